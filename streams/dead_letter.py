"""Dead letters: what could not be processed, with the bytes, the place and the reason.

A letter names the members whose fate it settles, so that a group can close without them and the audit finds them.
"""

from __future__ import annotations

from laminar.schemas import records as r
from laminar.streams.log import LogRecord

__all__ = ["MAX_VALUE_BYTES", "dead_letter", "members_of"]

MAX_VALUE_BYTES = 16 * 1024 * 1024
"""A larger source value is left out of its letter: it still stands where the letter says."""


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
    """The letter for one source record. ``record``: what it decoded to, if it did."""
    group_id, trajectory_ids = members_of(record)
    value, message = source.value, str(error) or type(error).__name__
    if value is not None and len(value) > max_value_bytes:
        message = f"{message} (the source's {len(value)} bytes are left out; read them at {source.where})"
        value = None
    return r.DeadLetter(
        operator=operator,
        kind=type(error).__name__,
        error=message.encode("utf-8", "replace").decode(),
        topic=source.topic,
        partition=source.partition,
        offset=source.offset,
        attempt=attempt,
        key=source.key,
        value=value,
        headers=tuple(r.Header(key=key, value=content) for key, content in source.headers),
        group_id=group_id,
        trajectory_ids=trajectory_ids,
        at_ms=at_ms,
    )


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
