"""Dead letters: what could not be processed, with the bytes, the place and the reason.

A letter names the members whose fate it settles, so that a group can close without them and the audit finds them.
A letter never stands in its own way: a value, headers or a text that are too large are left out, and ``send_letter``
falls back to a bare one where ``dead.letters`` takes less than that.
"""

from __future__ import annotations

from laminar.schemas import records as r
from laminar.schemas.errors import RecordTooLarge
from laminar.streams.log import LogRecord, Transaction
from laminar.streams.topics import TOPICS, Encoder, outgoing

__all__ = [
    "DEAD_LETTERS",
    "MAX_VALUE_BYTES",
    "RETRY_OF",
    "RETRY_SOURCE",
    "bare",
    "dead_letter",
    "members_of",
    "place_of",
    "send_letter",
    "shortened",
]

DEAD_LETTERS = "dead.letters"

MAX_VALUE_BYTES = 16 * 1024 * 1024
"""A larger source value is left out of its letter: it still stands where the letter says."""

RETRY_OF = "laminar-retry-of"
"""Header of a record that was put on its topic again: the place of its letter, ``dead.letters[0]@17``."""
RETRY_SOURCE = "laminar-retry-source"
"""Header of a record that was put on its topic again: where the original stands, ``trajectories.completed[3]@99``."""

_MAX_TEXT = 16 * 1024
_MAX_SIDE_BYTES = 64 * 1024
"""Of the key, and of all headers together; larger ones are left out."""
_BARE_TEXT = 512
_BARE_KEY = 1024


def dead_letter(
    source: LogRecord,
    error: BaseException,
    *,
    operator: str,
    attempt: int,
    at_ms: int,
    record: r.Record | None = None,
    max_value_bytes: int = MAX_VALUE_BYTES,
) -> r.DeadLetter:
    """The letter for one source record.

    ``record``: what it decoded to, if it did. One that does not belong on its topic is no member's fate.
    """
    topic = TOPICS.get(source.topic)
    group_id, trajectory_ids = members_of(record if topic is None or isinstance(record, topic.records) else None)
    key, value, headers = source.key, source.value, source.headers
    left_out = []
    if value is not None and len(value) > max_value_bytes:
        left_out.append(f"{len(value)} bytes")
        value = None
    if key is not None and len(key) > _MAX_SIDE_BYTES:
        left_out.append(f"key of {len(key)} bytes")
        key = None
    if (size := sum(len(name) + len(content) for name, content in headers)) > _MAX_SIDE_BYTES:
        left_out.append(f"headers of {size} bytes")
        headers = ()
    message = shortened(str(error) or type(error).__name__)
    if left_out:
        message = f"{message} (the source's {', '.join(left_out)} are left out; read them at {source.where})"
    return r.DeadLetter(
        operator=operator,
        kind=type(error).__name__,
        error=message,
        topic=source.topic,
        partition=source.partition,
        offset=source.offset,
        attempt=attempt,
        key=key,
        value=value,
        headers=tuple(r.Header(key=shortened(name), value=content) for name, content in headers),
        group_id=group_id,
        trajectory_ids=trajectory_ids,
        at_ms=at_ms,
    )


def bare(letter: r.DeadLetter) -> r.DeadLetter:
    """The same letter, small: without the source's value and headers. What it says about fates stays."""
    where = f"{letter.topic}[{letter.partition}]@{letter.offset}"
    size = "bytes" if letter.value is None else f"{len(letter.value)} bytes"
    return r.DeadLetter(
        operator=letter.operator,
        kind=letter.kind,
        error=f"{shortened(letter.error, _BARE_TEXT)} (the source's {size} are left out; read them at {where})",
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        attempt=letter.attempt,
        key=letter.key if letter.key is not None and len(letter.key) <= _BARE_KEY else None,
        value=None,
        group_id=letter.group_id,
        trajectory_ids=letter.trajectory_ids,
        at_ms=letter.at_ms,
    )


def send_letter(transaction: Transaction, codec: Encoder, letter: r.DeadLetter) -> None:
    """Add the letter to a transaction; a bare one if ``dead.letters`` does not take it as it is."""
    try:
        transaction.send(outgoing(codec, letter))
    except RecordTooLarge:
        transaction.send(outgoing(codec, bare(letter)))


def shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """The text as UTF-8 can hold it, with its middle left out where it is longer than ``limit`` characters."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... ({len(text)} characters) ... {text[-limit // 4 :]}"


def place_of(partition: int, offset: int) -> str:
    """Where a letter stands, as a person names it.

    >>> place_of(0, 17)
    '0@17'
    """
    return f"{partition}@{offset}"


def members_of(record: r.Record | None) -> tuple[str | None, tuple[str, ...]]:
    """The group and the members that a record is about."""
    if isinstance(record, r.Prompt):
        group = record.prompt_id
        return group, tuple(r.trajectory_id(group, member) for member in range(record.group_size))
    if isinstance(record, r.ScoredTrajectory):
        record = record.trajectory
    if isinstance(record, r.CompletedTrajectory):
        return record.group_id, (record.trajectory_id,)
    if isinstance(record, r.AdoptCommand):
        return record.snapshot.prompt.prompt_id, (record.snapshot.trajectory_id,)
    if isinstance(record, r.TrajectoryStarted | r.TrajectoryTokens | r.TrajectoryMoved | r.TrajectoryEnded):
        return r.group_id_of(record.trajectory_id), (record.trajectory_id,)
    return None, ()
