"""The state that all handles of one memory log share."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from laminar.streams.embedded.assignment import Assignor
from laminar.streams.embedded.group import Group
from laminar.streams.embedded.retention import Entry, expired, superseded
from laminar.streams.embedded.store import Commit
from laminar.streams.log import LogRecord, OutRecord, TopicPartition, TopicSpec

__all__ = ["Hanging", "MemoryBroker", "MemoryPartition"]

_OFFSET = attrgetter("offset")


@dataclass(slots=True)
class MemoryPartition:
    """One partition: records by offset, with gaps where compaction removed some."""

    records: list[LogRecord] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def index(self, offset: int) -> int:
        """Position in ``records`` of the first one at or above the offset."""
        return bisect_left(self.records, offset, key=_OFFSET)


@dataclass(slots=True)
class Hanging:
    """A transaction before its decision: readers stop at these offsets."""

    since: float
    first: dict[TopicPartition, int]
    commit: Commit
    commits: bool = False
    """How the broker will decide; False: it is aborted."""
    due: float = math.inf
    """When the broker decides by itself."""


class MemoryBroker:
    """Topics, groups and producers. Handles lock ``changed`` around every use."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        assignor: Assignor = "sticky",
        transaction_timeout_s: float = 60.0,
    ) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self.version = 0
        self.specs: dict[str, TopicSpec] = {}
        self.partitions: dict[TopicPartition, MemoryPartition] = {}
        self.groups: dict[str, Group] = {}
        self.offsets: dict[str, dict[TopicPartition, int]] = {}
        self.epochs: dict[str, int] = {}
        self.hanging: dict[str, Hanging] = {}
        self.members = 0
        """Group members that there have been: what makes their names unique."""
        self._assignor: Assignor = assignor
        self._transaction_timeout_s = transaction_timeout_s

    def touch(self) -> None:
        """Wake everyone who waits."""
        self.version += 1
        self.changed.notify_all()

    def group(self, name: str) -> Group:
        """The group, made when it is new."""
        return self.groups.setdefault(name, Group(name, self._assignor))

    def append(self, records: Mapping[TopicPartition, Sequence[OutRecord]]) -> None:
        """Give offsets and make visible."""
        now_ms = int(self.clock() * 1000)
        for where, bucket in records.items():
            partition = self.partitions[where]
            for record in bucket:
                partition.records.append(
                    LogRecord(
                        topic=where.topic,
                        partition=where.partition,
                        offset=partition.end,
                        timestamp_ms=now_ms if record.timestamp_ms is None else record.timestamp_ms,
                        key=record.key,
                        value=record.value,
                        headers=record.headers,
                    )
                )
                partition.end += 1

    def apply(self, commit: Commit) -> None:
        """Make a transaction visible: its records and its offsets."""
        self.append(commit.records)
        for membership, offsets in commit.offsets:
            self.offsets.setdefault(membership.group, {}).update(offsets)
        self.touch()

    def decide(self, name: str) -> None:
        """End the hanging transaction of this producer, if there is one: as it was decided, else it is aborted."""
        hanging = self.hanging.pop(name, None)
        if hanging is None:
            return
        if hanging.commits:
            self.apply(hanging.commit)
        self.touch()

    def decide_offsets(self, group: str) -> None:
        """Nobody reads a group's offsets while a transaction that carries some is open."""
        for name, hanging in list(self.hanging.items()):
            if any(membership.group == group for membership, _ in hanging.commit.offsets):
                self.decide(name)

    def stable_end(self, partition: TopicPartition) -> int:
        """The offset after the last readable record: hanging transactions hold it back until they time out."""
        if not self.hanging:
            return self.partitions[partition].end
        now = self.clock()
        for name, hanging in list(self.hanging.items()):
            if now >= hanging.due:
                self.decide(name)
            elif now > hanging.since + self._transaction_timeout_s:
                del self.hanging[name]
        ends = [h.first[partition] for h in self.hanging.values() if partition in h.first]
        return min([self.partitions[partition].end, *ends])

    def maintain(self, now: float) -> None:
        """Retention and compaction, as if the time were ``now`` (Unix epoch seconds)."""
        for key, partition in self.partitions.items():
            spec = self.specs[key.topic]
            stable = self.stable_end(key)
            if "delete" in spec.cleanup:
                drop = expired(partition.records, spec, now_ms=int(now * 1000), end=stable)
                if drop:
                    partition.start = partition.records[drop - 1].offset + 1
                    del partition.records[:drop]
            if "compact" in spec.cleanup:
                entries = [Entry(r.offset, r.timestamp_ms, r.key, r.value is None) for r in partition.records]
                gone = superseded(entries, spec, now_ms=int(now * 1000), end=stable)
                partition.records = [r for r in partition.records if r.offset not in gone]
        self.touch()
