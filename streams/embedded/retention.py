"""What retention and compaction take away: pure functions over one partition's records, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laminar.streams.log import LogRecord, TopicSpec

__all__ = ["DELETE_RETENTION_MS", "Entry", "expired", "superseded"]

DELETE_RETENTION_MS = 24 * 3600 * 1000
"""How long a delete (a null value on a compacted topic) stays, so that slow readers still see it. Kafka's default."""


class Entry(NamedTuple):
    """What compaction needs to know of a record."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    deletes: bool
    """The value is null."""


def expired(records: Sequence[LogRecord], spec: TopicSpec, *, now_ms: int, end: int) -> int:
    """How many of the oldest records (below offset ``end``) retention removes.

    By age: every record up to the first that is young enough. By size: the oldest, as long as what
    remains is still at least ``retention_bytes``.
    """
    drop = 0
    if spec.retention_ms >= 0:
        limit = now_ms - spec.retention_ms
        while drop < len(records) and records[drop].offset < end and records[drop].timestamp_ms < limit:
            drop += 1
    if spec.retention_bytes >= 0:
        size = sum(_size(r) for r in records[drop:])
        while (
            drop < len(records) and records[drop].offset < end and size - _size(records[drop]) >= spec.retention_bytes
        ):
            size -= _size(records[drop])
            drop += 1
    return drop


def superseded(records: Sequence[Entry], spec: TopicSpec, *, now_ms: int, end: int) -> set[int]:
    """Offsets (below ``end``) that compaction removes: all but the newest of each key, and old deletes."""
    young = now_ms - spec.compaction_lag_ms
    old_delete = now_ms - max(spec.compaction_lag_ms, DELETE_RETENTION_MS)
    newest = {r.key: r.offset for r in records if r.offset < end}
    gone = set()
    for r in records:
        if r.offset >= end or r.timestamp_ms > young:
            continue
        if newest[r.key] != r.offset or (r.deletes and r.timestamp_ms <= old_delete):
            gone.add(r.offset)
    return gone


def _size(record: LogRecord) -> int:
    return len(record.key or b"") + len(record.value or b"")
