"""How many records a group has still to commit.

The last stable offset counts control markers and aborted records, which nobody can ever commit past: by arithmetic the
lag never reaches 0. So the tail is read: exactly, as long as it is small; beyond that the rest is counted by offsets.
"""

from __future__ import annotations

from laminar.streams.deadline import Deadline
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.offsets import Offsets
from laminar.streams.kafka.reader import KafkaReader
from laminar.streams.log import TopicPartition

__all__ = ["Lag"]

_EXACT_RECORDS = 1000
_EXACT_BYTES = 1024 * 1024
_EXACT_S = 1.0


class Lag:
    """Keeps one reader."""

    def __init__(self, connection: Connection, admin: Admin, offsets: Offsets) -> None:
        self._connection = connection
        self._admin = admin
        self._offsets = offsets
        self._reader: KafkaReader | None = None

    def of(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Per partition; never below the truth, and exact near 0."""
        every = [TopicPartition(topic, p) for p in range(self._admin.facts(topic).partitions)]
        bounds = self._offsets.bounds(every)
        ends = {p: bounds[p].end for p in every}
        committed = self._offsets.committed(group, every)
        first = {p: max(committed.get(p, 0), bounds[p].start) for p in every}
        lag = {p: max(0, ends[p] - first[p]) for p in every}
        behind = {p: first[p] for p in every if lag[p] > 0}
        if behind:
            lag.update(self._counted(behind, ends))
        return lag

    def _counted(self, first: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        if self._reader is None:
            self._reader = KafkaReader(self._connection, self._admin, fetch_wait_ms=5)
        reader = self._reader
        reader.assign(first)
        counted = dict.fromkeys(first, 0)
        size = 0
        deadline = Deadline.after(_EXACT_S, "lag")
        while True:
            at = reader.position()
            left = {p: max(0, ends[p] - at[p]) for p in first}
            if not any(left.values()) or size > _EXACT_BYTES or deadline.passed:
                break
            if sum(counted.values()) > _EXACT_RECORDS:
                break
            for record in reader.poll(100, min(0.02, deadline.remaining())):
                counted[record.source] += record.offset < ends[record.source]
                size += len(record.value or b"")
        reader.assign({})
        return {p: counted[p] + left[p] for p in first}

    def close(self) -> None:
        """Release the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
