"""A namespace inside a log: every topic gets a prefix, so that runs can share a cluster.

Operators go on using the catalogue's names; on the log stands ``{prefix}prompts`` and so on. Errors of the log name the
topics as they stand there. Groups and transactional ids begin with the run's id anyway and stay as they are.

>>> log = NamespacedLog(KafkaLog("127.0.0.1:9092"), "first.")                            # doctest: +SKIP
>>> log.reader().bounds(TopicPartition("prompts", 0))       # of topic first.prompts     # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

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

__all__ = ["NamespacedLog"]


class _Names:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def out(self, name: str) -> str:
        return self.prefix + name

    def out_partition(self, partition: TopicPartition) -> TopicPartition:
        return TopicPartition(self.prefix + partition.topic, partition.partition)

    def out_keys(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return {self.out_partition(p): offset for p, offset in offsets.items()}

    def out_all(self, partitions: frozenset[TopicPartition]) -> frozenset[TopicPartition]:
        return frozenset(map(self.out_partition, partitions))

    def back(self, partition: TopicPartition) -> TopicPartition:
        return TopicPartition(partition.topic.removeprefix(self.prefix), partition.partition)

    def back_keys(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return {self.back(p): offset for p, offset in offsets.items()}

    def back_all(self, partitions: frozenset[TopicPartition]) -> frozenset[TopicPartition]:
        return frozenset(map(self.back, partitions))

    def records(self, records: list[LogRecord]) -> list[LogRecord]:
        return [replace(record, topic=record.topic.removeprefix(self.prefix)) for record in records]


class NamespacedLog:
    """See the module's docstring. Owns the log inside: closing this one closes it."""

    def __init__(self, log: Log, prefix: str) -> None:
        self._log = log
        self._names = _Names(prefix)

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See Log.create_topics."""
        self._log.create_topics([replace(spec, name=self._names.out(spec.name)) for spec in specs])

    def topics(self) -> dict[str, TopicInfo]:
        """The topics of this namespace. See Log.topics."""
        prefix = self._names.prefix
        found = {n.removeprefix(prefix): info for n, info in self._log.topics().items() if n.startswith(prefix)}
        return {name: replace(info, name=name) for name, info in found.items()}

    def delete_topic(self, name: str) -> None:
        """See Log.delete_topic."""
        self._log.delete_topic(self._names.out(name))

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
        names = self._names

        def told(callback: RebalanceCallback | None) -> RebalanceCallback | None:
            return None if callback is None else lambda partitions: callback(names.back_all(partitions))

        return _Consumer(
            self._log.consumer(
                group,
                [names.out(topic) for topic in topics],
                instance=instance,
                on_assign=told(on_assign),
                on_revoke=told(on_revoke),
            ),
            names,
        )

    def reader(self) -> Reader:
        """See Log.reader."""
        return _Reader(self._log.reader(), self._names)

    def producer(self, transactional_id: str) -> Producer:
        """See Log.producer."""
        return _Producer(self._log.producer(transactional_id), self._names)

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """See Log.committed."""
        return self._names.back_keys(self._log.committed(group, self._names.out(topic)))

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """See Log.lag."""
        return self._names.back_keys(self._log.lag(group, self._names.out(topic)))

    def close(self) -> None:
        """See Log.close."""
        self._log.close()


class _Transaction:
    def __init__(self, inner: Transaction, names: _Names) -> None:
        self._inner = inner
        self._names = names

    def send(self, record: OutRecord) -> None:
        self._inner.send(replace(record, topic=self._names.out(record.topic)))

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        self._inner.commit_offsets(membership, self._names.out_keys(offsets))


class _Producer:
    def __init__(self, inner: Producer, names: _Names) -> None:
        self._inner = inner
        self._names = names

    def transaction(
        self, timeout_s: float | None = None, *, visible: bool = True
    ) -> AbstractContextManager[Transaction]:
        return self._transaction(timeout_s, visible=visible)

    @contextmanager
    def _transaction(self, timeout_s: float | None, *, visible: bool) -> Iterator[Transaction]:
        with self._inner.transaction(timeout_s, visible=visible) as inner:
            yield _Transaction(inner, self._names)

    def close(self) -> None:
        self._inner.close()


class _Consumer:
    def __init__(self, inner: Consumer, names: _Names) -> None:
        self._inner = inner
        self._names = names

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        return self._names.records(self._inner.poll(max_records, timeout_s))

    def assignment(self) -> frozenset[TopicPartition]:
        return self._names.back_all(self._inner.assignment())

    def position(self) -> dict[TopicPartition, int]:
        return self._names.back_keys(self._inner.position())

    def committed(self) -> dict[TopicPartition, int]:
        return self._names.back_keys(self._inner.committed())

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(self._names.out_partition(partition), offset)

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        self._inner.pause(self._names.out_all(partitions))

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        self._inner.resume(self._names.out_all(partitions))

    def membership(self) -> Membership:
        return self._inner.membership()

    def close(self) -> None:
        self._inner.close()


class _Reader:
    def __init__(self, inner: Reader, names: _Names) -> None:
        self._inner = inner
        self._names = names

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._inner.assign(self._names.out_keys(positions))

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        return self._names.records(self._inner.poll(max_records, timeout_s))

    def position(self) -> dict[TopicPartition, int]:
        return self._names.back_keys(self._inner.position())

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(self._names.out_partition(partition), offset)

    def bounds(self, partition: TopicPartition) -> Bounds:
        return self._inner.bounds(self._names.out_partition(partition))

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        return self._inner.offset_at(self._names.out_partition(partition), timestamp_ms)

    def close(self) -> None:
        self._inner.close()
