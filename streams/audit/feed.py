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
_BATCH_BYTES = 2 * 1024 * 1024
_MIN_BATCH, _MAX_BATCH = 16, 1000


class _Source:
    """One topic."""

    def __init__(self, reader: Reader, positions: Mapping[TopicPartition, int]) -> None:
        self.reader = reader
        self.reader.assign(positions)
        self.buffer: deque[LogRecord] = deque()
        self.mean_bytes = 1024.0

    def fill(self, ends: Mapping[TopicPartition, int], timeout_s: float) -> bool:
        """Get something into the buffer; True when there is something, or nothing more up to the ends."""
        if self.buffer or self.done(ends):
            return True
        wanted = max(_MIN_BATCH, min(_MAX_BATCH, int(_BATCH_BYTES / self.mean_bytes)))
        got = self.reader.poll(wanted, timeout_s)
        if got:
            mean = sum(len(one.value or b"") for one in got) / len(got)
            self.mean_bytes = max(256.0, self.mean_bytes * 0.5 + mean * 0.5)
            self.buffer.extend(got)
        return bool(got) or self.done(ends)

    def done(self, ends: Mapping[TopicPartition, int]) -> bool:
        """Whether all up to the ends was polled."""
        at = self.reader.position()
        return all(at[p] >= ends[p] for p in at if p in ends)


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
            ready = [source for source in self._sources if source.buffer]
            if not ready:
                return
            yield from self._merge(ready)

    def positions(self) -> dict[TopicPartition, int]:
        """Next offset of each partition, for whoever has taken everything."""
        return {p: at for source in self._sources for p, at in source.reader.position().items()}

    def close(self) -> None:
        """Release the readers."""
        for source in self._sources:
            source.reader.close()

    def _merge(self, ready: list[_Source]) -> Iterator[LogRecord]:
        """The oldest first, until a buffer is empty: then it must be filled before it is known what comes next."""
        heads = [(source.buffer[0].timestamp_ms, at) for at, source in enumerate(ready)]
        heapify(heads)
        while True:
            at = heads[0][1]
            buffer = ready[at].buffer
            second = min(heads[1:3], default=None)
            while buffer and (second is None or (buffer[0].timestamp_ms, at) <= second):
                yield buffer.popleft()
            if not buffer:
                return
            heapreplace(heads, (buffer[0].timestamp_ms, at))

    def _where(self, ends: Mapping[TopicPartition, int]) -> str:
        at = self.positions()
        return ", ".join(f"{p}@{at[p]} of {end}" for p, end in ends.items() if at.get(p, end) < end)
