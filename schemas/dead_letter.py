"""Dead letters: what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeadLetter", "Header"]


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
