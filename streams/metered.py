"""A log that counts what goes through it (``meter.py``), around any adapter. It changes nothing else.

>>> meter = Meter()
>>> log = MeteredLog(open_log(config, run_id="first"), meter)                            # doctest: +SKIP
>>> meter.outcomes["committed"], meter.read["prompts"].bytes                             # doctest: +SKIP
(12, 40960)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from laminar.schemas.errors import Aborted, Evicted, Fenced, Retryable
from laminar.streams.log import (
    Bounds,
    Consumer,
    Log,
    LogRecord,
    Membership,
    OutRecord,
    Producer,
    Reader,
    RebalanceCallback,
    TopicInfo,
    TopicPartition,
    TopicSpec,
    Transaction,
)
from laminar.streams.meter import GroupCount, Meter, Outcome

__all__ = ["MeteredLog"]

_POSITIONS_S = 1.0
"""How often positions are taken down."""


class MeteredLog:
    """See the module's docstring. Owns the log inside: closing this one closes it."""

    def __init__(self, log: Log, meter: Meter) -> None:
        self._log = log
        self._meter = meter

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See Log.create_topics."""
        self._log.create_topics(specs)

    def topics(self) -> dict[str, TopicInfo]:
        """See Log.topics."""
        return self._log.topics()

    def delete_topic(self, name: str) -> None:
        """See Log.delete_topic."""
        self._log.delete_topic(name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> Consumer:
        """See Log.consumer."""
        count = self._meter.groups[group]
        count.topics = tuple(topics)

        def assigned(partitions: frozenset[TopicPartition]) -> None:
            count.assignments += 1
            count.assigned |= partitions
            if on_assign is not None:
                on_assign(partitions)

        def revoked(partitions: frozenset[TopicPartition]) -> None:
            count.revocations += 1
            count.assigned -= partitions
            if on_revoke is not None:
                on_revoke(partitions)

        inner = self._log.consumer(group, topics, instance=instance, on_assign=assigned, on_revoke=revoked)
        return _Consumer(inner, self._meter, count)

    def reader(self) -> Reader:
        """See Log.reader."""
        return _Reader(self._log.reader(), self._meter)

    def producer(self, transactional_id: str) -> Producer:
        """See Log.producer."""
        return _Producer(self._log.producer(transactional_id), self._meter)

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """See Log.committed."""
        return self._log.committed(group, topic)

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """See Log.lag."""
        return self._log.lag(group, topic)

    def close(self) -> None:
        """See Log.close."""
        self._log.close()


class _Transaction:
    """Entered, it is the transaction; left, it knows how it ended."""

    def __init__(self, inner: AbstractContextManager[Transaction], meter: Meter) -> None:
        self._entering = inner
        self._meter = meter
        self._sent: dict[str, list[int]] = {}
        self._offsets: list[tuple[str, Mapping[TopicPartition, int]]] = []

    def __enter__(self) -> Transaction:
        try:
            self._inner = self._entering.__enter__()
        except Fenced:
            self._meter.outcomes["fenced"] += 1
            raise
        self._send = self._inner.send
        self._meter.begun += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        began = self._meter.clock()
        try:
            suppressed = self._entering.__exit__(kind, error, trace)
        except BaseException as raised:
            self._meter.outcomes[_outcome(raised, in_commit=error is None)] += 1
            raise
        if error is None:
            self._meter.count_committed(self._sent, self._offsets, self._meter.clock() - began)
        else:
            self._meter.outcomes[_outcome(error, in_commit=False)] += 1
        return suppressed

    def send(self, record: OutRecord) -> None:
        self._send(record)
        count = self._sent.get(record.topic)
        if count is None:
            count = self._sent[record.topic] = [0, 0]
        count[0] += 1
        if record.value is not None:
            count[1] += len(record.value)

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        self._inner.commit_offsets(membership, offsets)
        self._offsets.append((membership.group, offsets))


def _outcome(error: BaseException, *, in_commit: bool) -> Outcome:
    if isinstance(error, Evicted):
        return "evicted"
    if isinstance(error, Fenced):
        return "fenced"
    unknown = in_commit and isinstance(error, Retryable) and not isinstance(error, Aborted)
    return "unknown" if unknown else "aborted"


class _Producer:
    def __init__(self, inner: Producer, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def transaction(
        self, timeout_s: float | None = None, *, visible: bool = True
    ) -> AbstractContextManager[Transaction]:
        return _Transaction(self._inner.transaction(timeout_s, visible=visible), self._meter)

    def close(self) -> None:
        self._inner.close()


class _Consumer:
    def __init__(self, inner: Consumer, meter: Meter, count: GroupCount) -> None:
        self._inner = inner
        self._meter = meter
        self._count = count
        self._next_positions = 0.0
        self._closed = False
        count.members += 1

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        records = self._inner.poll(max_records, timeout_s)
        if records:
            self._meter.count_read(records)
        now = self._count.polled_at = self._meter.clock()
        if now >= self._next_positions:
            self._next_positions = now + _POSITIONS_S
            self._meter.positions.update(self._inner.position())
        return records

    def assignment(self) -> frozenset[TopicPartition]:
        return self._inner.assignment()

    def position(self) -> dict[TopicPartition, int]:
        return self._inner.position()

    def committed(self) -> dict[TopicPartition, int]:
        return self._inner.committed()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(partition, offset)

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        self._inner.pause(partitions)

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        self._inner.resume(partitions)

    def membership(self) -> Membership:
        return self._inner.membership()

    def close(self) -> None:
        self._inner.close()
        if not self._closed:
            self._closed = True
            self._count.members -= 1
            self._count.assigned = frozenset()


class _Reader:
    def __init__(self, inner: Reader, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._next_positions = 0.0

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._inner.assign(positions)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        records = self._inner.poll(max_records, timeout_s)
        if records:
            self._meter.count_read(records)
        now = self._meter.clock()
        if now >= self._next_positions:
            self._next_positions = now + _POSITIONS_S
            self._meter.positions.update(self._inner.position())
        return records

    def position(self) -> dict[TopicPartition, int]:
        return self._inner.position()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(partition, offset)

    def bounds(self, partition: TopicPartition) -> Bounds:
        return self._inner.bounds(partition)

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        return self._inner.offset_at(partition, timestamp_ms)

    def close(self) -> None:
        self._inner.close()
