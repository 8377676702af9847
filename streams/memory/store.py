"""One handle's view of a memory broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from laminar.schemas.errors import Fenced, LaminarError, OffsetOutOfRange, TopicMismatch, Unavailable, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.embedded.group import Group
from laminar.streams.embedded.store import Commit, Fetched, GroupToken
from laminar.streams.log import Bounds, TopicPartition, TopicSpec
from laminar.streams.memory.broker import Hanging, MemoryBroker, MemoryPartition
from laminar.streams.memory.faults import Faults, Undecided

__all__ = ["MemoryStore"]


class MemoryStore:
    """Implements ``laminar.streams.embedded.store.Store``."""

    volatile = True

    def __init__(
        self, broker: MemoryBroker, faults: Faults, *, blocking: bool, sleep: Callable[[float], None] | None = None
    ) -> None:
        """``sleep``: how time passes where a call waits, instead of waiting for a change."""
        self._broker = broker
        self._faults = faults
        self._sleep = sleep
        self.blocking = blocking or sleep is not None

    def now(self) -> float:
        """The broker's clock."""
        return self._broker.clock()

    def monotonic(self) -> float:
        """The broker's clock: under a test's control it is the only one."""
        return self._broker.clock()

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """All of them, or none when one does not match."""
        with self._broker.changed:
            for spec in specs:
                known = self._broker.specs.get(spec.name)
                if known is not None and known.partitions != spec.partitions:
                    raise TopicMismatch(
                        f"{spec.name}: exists with {known.partitions} partitions, configured are {spec.partitions}"
                    )
            for spec in specs:
                if spec.name not in self._broker.specs:
                    self._broker.specs[spec.name] = spec
                    for p in range(spec.partitions):
                        self._broker.partitions[TopicPartition(spec.name, p)] = MemoryPartition()
            self._broker.touch()

    def topics(self) -> Mapping[str, TopicSpec]:
        """All topics."""
        with self._broker.changed:
            return dict(self._broker.specs)

    def topic(self, name: str) -> TopicSpec:
        """One topic."""
        spec = self._broker.specs.get(name)
        if spec is None:
            raise UnknownTopic(f"{name}: no such topic (valid: {', '.join(sorted(self._broker.specs))})")
        return spec

    def delete_topic(self, name: str) -> None:
        """The topic, its records and the offsets committed on it."""
        with self._broker.changed:
            self.topic(name)
            del self._broker.specs[name]
            for p in [p for p in self._broker.partitions if p.topic == name]:
                del self._broker.partitions[p]
            for offsets in self._broker.offsets.values():
                for p in [p for p in offsets if p.topic == name]:
                    del offsets[p]
            self._broker.touch()

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range."""
        self._reach("bounds")
        with self._broker.changed:
            return Bounds(self._partition(partition).start, self._broker.stable_end(partition))

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """First offset whose timestamp is at least this."""
        with self._broker.changed:
            end = self.bounds(partition).end
            for record in self._partition(partition).records:
                if record.timestamp_ms >= timestamp_ms:
                    return min(record.offset, end)
            return end

    def fetch(self, partition: TopicPartition, offset: int, max_records: int, who: str) -> Fetched:
        """Committed records from ``offset`` on."""
        with self._broker.changed:
            held = self._partition(partition)
            start, end = held.start, self._broker.stable_end(partition)
            if not start <= offset <= held.end:
                raise OffsetOutOfRange(f"{partition}: offset {offset} is not in the log ({start}..{end})")
            if offset >= end or self._faults.away() or self._faults.late(who, partition):
                return Fetched([], offset)
            first = held.index(offset)
            last = min(first + max_records, held.index(end))
            records = held.records[first:last]
            full = len(records) == max_records
            return Fetched(records, records[-1].offset + 1 if full else end)

    def open_producer(self, transactional_id: str) -> int:
        """A new epoch; what the older one left hanging is decided."""
        self._reach("a new producer")
        with self._broker.changed:
            epoch = self._broker.epochs.get(transactional_id, -1) + 1
            self._broker.epochs[transactional_id] = epoch
            self._broker.decide(transactional_id)
            return epoch

    def commit(self, commit: Commit, deadline: Deadline) -> None:  # noqa: ARG002 - nothing here waits
        """All or nothing."""
        name = commit.transactional_id
        with self._broker.changed:
            self._faults.at("before_commit", name)
            self._reach("a commit")
            self._check_producer(name, commit.epoch)
            self._broker.decide(name)
            for membership, offsets in commit.offsets:
                token = membership.token or GroupToken("", -1)
                self._broker.group(membership.group).check(
                    token.member if membership.token is not None else None, token.revision, offsets
                )
                for partition in offsets:
                    self._partition(partition)
            first = {partition: self._partition(partition).end for partition in commit.records}
            hanging = self._broker.hanging[name] = Hanging(self._broker.clock(), first, commit)
            self._inside(name, hanging)
            self._broker.apply(commit)
            self._faults.at("after_commit", name)

    def _inside(self, name: str, hanging: Hanging) -> None:
        """From the records' arrival to the decision. Returns when this producer is still the one to decide."""
        hangs = self._broker.hanging
        try:
            self._faults.at("inside_commit", name)
        except Undecided as error:
            hanging.commits, hanging.due = error.commits, error.due
            raise
        except LaminarError:
            if hangs.get(name) is hanging:
                del hangs[name]
            raise
        if hangs.pop(name, None) is not hanging:
            raise Fenced(f"producer {name}: its open transaction was aborted meanwhile; this process must stop")

    def group_revision(self, group: str) -> int:
        """-1 when it does not exist."""
        known = self._broker.groups.get(group)
        return -1 if known is None else known.revision

    @contextmanager
    def group(self, group: str) -> Iterator[Group]:
        """The group's state, alone."""
        with self._broker.changed:
            found = self._broker.group(group)
            before = found.revision
            yield found
            if found.revision != before:
                self._broker.touch()

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Committed offsets."""
        self._reach("committed offsets")
        with self._broker.changed:
            self._broker.decide_offsets(group)
            return {p: o for p, o in self._broker.offsets.get(group, {}).items() if p.topic == topic}

    def unread(self, partition: TopicPartition, offset: int) -> int:
        """Readable records from ``offset`` on."""
        with self._broker.changed:
            held = self._partition(partition)
            return max(0, held.index(self._broker.stable_end(partition)) - held.index(offset))

    def version(self) -> object:
        """Grows with every change."""
        return self._broker.version

    def wait(self, version: object, timeout_s: float) -> None:
        """Until the version differs."""
        if self._sleep is not None:
            self._sleep(timeout_s)
            return
        with self._broker.changed:
            self._broker.changed.wait_for(lambda: self._broker.version != version, timeout_s)

    def close(self) -> None:
        """The broker outlives its handles."""

    def reachable(self) -> bool:
        """Unless the faults say otherwise."""
        return not self._faults.away()

    def member_name(self, instance: str | None) -> str:
        """A name that depends on nothing but what happened before."""
        self._broker.members += 1
        return f"{instance or 'member'}-{self._broker.members:06d}"

    def _reach(self, what: str) -> None:
        if self._faults.away():
            raise Unavailable(f"{what}: the broker does not answer")

    def _check_producer(self, transactional_id: str, epoch: int) -> None:
        newest = self._broker.epochs.get(transactional_id)
        if newest != epoch:
            raise Fenced(f"producer {transactional_id}: epoch {epoch} was replaced by {newest}; this process must stop")

    def _partition(self, partition: TopicPartition) -> MemoryPartition:
        held = self._broker.partitions.get(partition)
        if held is None:
            raise UnknownTopic(f"{partition}: no such partition (topics: {', '.join(sorted(self._broker.specs))})")
        return held
