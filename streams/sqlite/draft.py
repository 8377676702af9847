"""The records of a transaction, grouped by partition and packed into chunks, before they have offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laminar.streams.embedded.store import Pending
from laminar.streams.log import TopicPartition
from laminar.streams.sqlite.chunk import pack
from laminar.streams.sqlite.segment import Place

__all__ = ["LARGE_BYTES", "Draft", "drafts"]

LARGE_BYTES = 64 * 1024
"""Larger chunks lie in segment files. Records are gathered into chunks up to this size."""


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


def drafts(records: Sequence[Pending]) -> list[Draft]:
    """Chunks in order per partition."""
    by_partition: dict[TopicPartition, list[Pending]] = {}
    for record in records:
        known = by_partition.get(record.partition)
        if known is None:
            by_partition[record.partition] = [record]
        else:
            known.append(record)
    return [draft for partition, group in by_partition.items() for draft in _chunks(partition, group)]


def _chunks(partition: TopicPartition, records: Sequence[Pending]) -> list[Draft]:
    found: list[Draft] = []
    batch: list[Pending] = []
    size = 0
    for record in records:
        bytes_ = len(record.key or b"") + len(record.value or b"")
        if batch and size + bytes_ > LARGE_BYTES // 16 * 15:
            found.append(_draft(partition, batch))
            batch, size = [], 0
        batch.append(record)
        size += bytes_ + 40
    found.append(_draft(partition, batch))
    return found


def _draft(partition: TopicPartition, batch: Sequence[Pending]) -> Draft:
    parts = pack(((at, r.timestamp_ms, r.key, r.value, r.headers) for at, r in enumerate(batch)), 0)
    newest = max(r.timestamp_ms for r in batch)
    return Draft(partition, len(batch), newest, sum(map(len, parts)), parts)
