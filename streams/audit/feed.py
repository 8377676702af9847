"""Reads all topics of an audit together, by time, so that what belongs together comes close together.

The order between partitions is a matter of memory only: the audit's result does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heapreplace

from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord, Reader, TopicPartition

__all__ = ["Feed"]

_WAIT_S = 0.2
_BATCH_BYTES = 1024 * 1024
_MIN_BATCH, _MAX_BATCH = 4, 500
_HELD_BYTES = 32 * 1024 * 1024
"""Of one topic: with more than this in hand it does not wait for its other partitions."""


class _Source:
    """One topic, with what was polled of each partition and not taken yet."""

    def __init__(self, reader: Reader, positions: Mapping[TopicPartition, int]) -> None:
        self.reader = reader
        self.reader.assign(positions)
        self.lanes: dict[TopicPartition, deque[LogRecord]] = {p: deque() for p in positions}
        self._held = 0
        self._mean_bytes = 1024.0

    def fill(self, ends: Mapping[TopicPartition, int], timeout_s: float) -> bool:
        """Poll until the next record of each partition is known, or that there is none below its end.

        False: the log had nothing for one of them within the time.
        """
        while self._unknown(ends) and self._held < _HELD_BYTES:
            wanted = max(_MIN_BATCH, min(_MAX_BATCH, int(_BATCH_BYTES / self._mean_bytes)))
            got = self.reader.poll(wanted, timeout_s)
            for record in got:
                self.lanes[record.source].append(record)
            size = sum(len(one.value or b"") for one in got)
            self._held += size
            if got:
                self._mean_bytes = max(256.0, (self._mean_bytes + size / len(got)) / 2)
            elif self._unknown(ends):
                return False
        return True

    def taken(self, record: LogRecord) -> None:
        """It left its lane."""
        self._held -= len(record.value or b"")

    def _unknown(self, ends: Mapping[TopicPartition, int]) -> bool:
        at = self.reader.position()
        return any(not lane and at[p] < ends[p] for p, lane in self.lanes.items())


class Feed:
    """See the module's docstring."""

    def __init__(self, log: Log, positions: Mapping[TopicPartition, int]) -> None:
        """Reads every partition from its position on."""
        by_topic: dict[str, dict[TopicPartition, int]] = {}
        for partition, offset in positions.items():
            by_topic.setdefault(partition.topic, {})[partition] = offset
        self._sources = [_Source(log.reader(), at) for at in by_topic.values()]

    def until(self, ends: Mapping[TopicPartition, int], deadline: Deadline) -> Iterator[LogRecord]:
        """Everything below the ends, once, and perhaps more of it. Raises OffsetOutOfRange, DeadlineExceeded."""
        while True:
            waiting = False
            for source in self._sources:
                if not source.fill(ends, 0.0):
                    waiting = not source.fill(ends, min(_WAIT_S, deadline.remaining())) or waiting
            if waiting:
                deadline.check(self._where(ends))
                continue
            lanes = [(source, lane) for source in self._sources for lane in source.lanes.values() if lane]
            if not lanes:
                return
            yield from self._merge(lanes)

    def positions(self) -> dict[TopicPartition, int]:
        """Next offset of each partition, for whoever has taken everything."""
        return {p: at for source in self._sources for p, at in source.reader.position().items()}

    def close(self) -> None:
        """Release the readers."""
        for source in self._sources:
            source.reader.close()

    def _merge(self, lanes: list[tuple[_Source, deque[LogRecord]]]) -> Iterator[LogRecord]:
        """The oldest first, until a lane is empty: then it must be filled before it is known what comes next."""
        heads = [(lane[0].timestamp_ms, at) for at, (_, lane) in enumerate(lanes)]
        heapify(heads)
        while True:
            at = heads[0][1]
            source, lane = lanes[at]
            second = min(heads[1:3], default=None)
            while lane and (second is None or (lane[0].timestamp_ms, at) <= second):
                record = lane.popleft()
                source.taken(record)
                yield record
            if not lane:
                return
            heapreplace(heads, (lane[0].timestamp_ms, at))

    def _where(self, ends: Mapping[TopicPartition, int]) -> str:
        at = self.positions()
        return ", ".join(f"{p}@{at[p]} of {end}" for p, end in ends.items() if at.get(p, end) < end)
