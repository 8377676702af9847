"""The records of a transaction, grouped by partition and packed into chunks, before they have offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.sqlite.chunk import Head, pack_headers
from laminar.streams.sqlite.segment import Place

__all__ = ["CHUNK_BYTES", "LARGE_BYTES", "Draft", "drafts"]

CHUNK_BYTES = 128 * 1024
"""Records of one transaction and partition are gathered into chunks up to this size."""
LARGE_BYTES = 32 * 1024
"""Larger chunks lie in segment files: SQLite would write them twice, to its write-ahead log and to its pages."""


@dataclass(slots=True)
class Draft:
    """One chunk. Offsets inside it count from 0."""

    partition: TopicPartition
    count: int
    newest_ms: int
    size: int
    parts: list[bytes]
    place: Place | None = None

    @property
    def large(self) -> bool:
        """Whether it goes to a segment."""
        return self.size > LARGE_BYTES


def drafts(records: Mapping[TopicPartition, Sequence[OutRecord]], now_ms: int) -> list[Draft]:
    """Chunks in order per partition. ``now_ms``: the time of records without one."""
    found: list[Draft] = []
    for partition, bucket in records.items():
        _pack(found, partition, bucket, now_ms)
    return found


def _pack(found: list[Draft], partition: TopicPartition, bucket: Sequence[OutRecord], now_ms: int) -> None:
    parts: list[bytes] = []
    count, size, newest = 0, 0, 0
    head, head_bytes = Head.pack, Head.size
    for record in bucket:
        key, value, at = record.key, record.value, record.timestamp_ms
        if at is None:
            at = now_ms
        key_bytes = -1 if key is None else len(key)
        value_bytes = -1 if value is None else len(value)
        extra = pack_headers(record.headers) if record.headers else b""
        bytes_ = head_bytes + len(extra)
        if key:
            bytes_ += key_bytes
        if value:
            bytes_ += value_bytes
        if size + bytes_ > CHUNK_BYTES and count:
            found.append(Draft(partition, count, newest, size, parts))
            parts = []
            count, size, newest = 0, 0, 0
        parts.append(head(count, at, key_bytes, value_bytes, len(extra)))
        if key:
            parts.append(key)
        if value:
            parts.append(value)
        if extra:
            parts.append(extra)
        count += 1
        size += bytes_
        newest = at if at > newest else newest  # noqa: FURB136 - twice as fast as max()
    found.append(Draft(partition, count, newest, size, parts))
