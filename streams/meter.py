"""Plain counters of what a process does on the log. Each has one writer at a time; any thread may read.

>>> meter = Meter()
>>> meter.read["prompts"].records
0
>>> latency = Histogram((0.1, 1.0))
>>> latency.observe(0.05), latency.observe(7.0), latency.cumulative()
(None, None, [(0.1, 1), (1.0, 1), (inf, 2)])
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from laminar.streams.log import LogRecord, TopicPartition

__all__ = ["LATENCY_S", "OUTCOMES", "GroupCount", "Histogram", "Meter", "Outcome", "TopicCount"]

Outcome = Literal["committed", "aborted", "evicted", "fenced", "unknown"]
"""How a transaction ended. ``evicted``, ``fenced``: aborted with that reason; ``unknown``: no answer to the commit."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets of a latency, in seconds."""

_SIGNS_OF_LIFE = frozenset({"rollouts.status", "relays.status"})
"""Writing these is not progress."""


class Histogram:
    """Counts of observed values per bucket. Costs a bisection and two additions a value."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        """``bounds``: upper bounds of the buckets, ascending; one without a bound is added."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values up to it) for each bucket, as Prometheus wants them."""
        return list(zip((*self._bounds, math.inf), accumulate(self._counts), strict=True))


@dataclass(slots=True)
class TopicCount:
    """Records of one topic, and the bytes of their values."""

    records: int = 0
    bytes: int = 0


@dataclass(slots=True)
class GroupCount:
    """This process as a member of one consumer group."""

    topics: tuple[str, ...] = ()
    members: int = 0
    """Open consumers of the group in this process."""
    assigned: frozenset[TopicPartition] = frozenset()
    assignments: int = 0
    """Rebalances that gave partitions."""
    revocations: int = 0
    """Rebalances that took partitions."""
    polled_at: float = 0.0
    """Monotonic seconds of the newest poll."""


class Meter:
    """The counters of one process. Read dicts from another thread by ``.copy()``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: monotonic seconds."""
        self.clock = clock
        self.begun = 0
        """Transactions begun."""
        self.outcomes: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.commit_s = Histogram()
        """Time of successful commits, from the end of the work to the broker's answer."""
        self.read: defaultdict[str, TopicCount] = defaultdict(TopicCount)
        """Delivered by consumers and readers; counted again after a rewind."""
        self.written: defaultdict[str, TopicCount] = defaultdict(TopicCount)
        """In committed transactions."""
        self.groups: defaultdict[str, GroupCount] = defaultdict(GroupCount)
        self.positions: dict[TopicPartition, int] = {}
        """Next offset of consumers and readers, about once a second."""
        self.committed: dict[tuple[str, TopicPartition], int] = {}
        """Offsets that this process committed, by (group, partition)."""
        self.progress_at = clock()
        """Monotonic seconds of the newest commit that wrote data or moved an offset on."""

    def count_read(self, records: Sequence[LogRecord]) -> None:
        """Count a poll's records."""
        topic, count = "", None
        for record in records:
            if count is None or record.topic != topic:
                topic = record.topic
                count = self.read[topic]
            count.records += 1
            if record.value is not None:
                count.bytes += len(record.value)

    def count_committed(
        self,
        sent: Mapping[str, Sequence[int]],
        offsets: Sequence[tuple[str, Mapping[TopicPartition, int]]],
        seconds: float,
    ) -> None:
        """Count a committed transaction: (records, bytes) per topic, and (group, next offsets)."""
        self.outcomes["committed"] += 1
        self.commit_s.observe(seconds)
        moved = False
        for topic, (records, size) in sent.items():
            count = self.written[topic]
            count.records += records
            count.bytes += size
            moved = moved or topic not in _SIGNS_OF_LIFE
        for group, positions in offsets:
            for partition, offset in positions.items():
                if self.committed.get((group, partition), -1) < offset:
                    self.committed[group, partition] = offset
                    moved = True
        if moved:
            self.progress_at = self.clock()
