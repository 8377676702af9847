"""Dead letters: what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DeadLetter", "DeadLetterSettled", "Header", "OffsetsSkipped", "SettleAction"]

SettleAction = Literal["retry", "drop"]
"""``retry``: the original stands on its topic again, by the same transaction; ``drop``: the letter stays a fate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One header of a dead letter's original record."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record or a trajectory that could not be processed: topic ``dead.letters``, key = the source's key."""

    operator: str
    kind: str
    """The error's class name."""
    error: str
    topic: str
    partition: int
    offset: int
    """Of the source record; -1 when the fault is not a record's."""
    attempt: int
    """How often it was tried."""
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    group_id: str | None = None
    trajectory_ids: tuple[str, ...] = ()
    """Members whose fate this letter settles."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterSettled:
    """What a person decided about one dead letter: topic ``dead.letters``, key = the letter's key.

    At most one counts per letter, the first.
    """

    letter_partition: int
    """Where the letter stands on ``dead.letters``."""
    letter_offset: int
    action: SettleAction
    key: bytes | None
    """The letter's key."""
    group_id: str | None = None
    trajectory_ids: tuple[str, ...] = ()
    """Members that the letter had settled; a retry gives them back to the dataflow."""
    by: str
    """Who decided: ``user@host``."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsSkipped:
    """A group jumped over offsets that retention had removed, as configured: topic ``dead.letters``.

    Key = ``topic[partition]``. Written in the transaction that commits the jump or the first offsets after it.
    """

    operator: str
    group: str
    topic: str
    partition: int
    from_offset: int
    """The first offset that was needed."""
    to_offset: int
    """The first one that is still there, at which the group goes on."""
    at_ms: int
