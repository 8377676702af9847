"""A transactional producer over any store: a transaction is kept in memory and made visible in one go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from laminar.schemas.errors import Fatal, InvalidRecord, RecordTooLarge, Retryable, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.embedded.store import Commit, Store
from laminar.streams.log import Membership, OutRecord, TopicPartition, TopicSpec
from laminar.streams.partitioner import partition_of

__all__ = ["EmbeddedProducer", "EmbeddedTransaction"]


class _Topic:
    """A topic inside a transaction: its limits, and the records so far by partition."""

    __slots__ = ("buckets", "compacted", "max_bytes", "partitions")

    def __init__(self, spec: TopicSpec) -> None:
        self.max_bytes = spec.max_record_bytes
        self.partitions = spec.partitions
        self.compacted = spec.cleanup != "delete"
        self.buckets: dict[int, list[OutRecord]] = {}


class EmbeddedTransaction:
    """Implements ``laminar.streams.log.Transaction``."""

    def __init__(self, store: Store, turns: dict[str, int], max_bytes: int) -> None:
        self._store = store
        self._turns = turns
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._topics: dict[str, _Topic] = {}
        self.open = True
        self.offsets: list[tuple[Membership, Mapping[TopicPartition, int]]] = []

    def send(self, record: OutRecord) -> None:
        """Add a record. Raises RecordTooLarge, UnknownTopic, Retryable (the transaction is full)."""
        topic = self._topics.get(record.topic)
        if topic is None or not self.open:
            self._check_open()
            topic = self._topics[record.topic] = _Topic(self._store.topic(record.topic))
        key, value = record.key, record.value
        size = (len(key) if key else 0) + (len(value) if value else 0)
        if record.headers:
            size += sum(len(name.encode()) + len(content) for name, content in record.headers)
        if size > topic.max_bytes or size > self._left:
            self._refuse(record, topic, size)
        if record.partition is not None or key is None:
            partition = self._partition(record, topic)
        else:
            partition = partition_of(key, topic.partitions)
        self._left -= size
        bucket = topic.buckets.get(partition)
        if bucket is None:
            topic.buckets[partition] = [record]
        else:
            bucket.append(record)

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit these together with the records."""
        self._check_open()
        for partition in offsets:
            if not 0 <= partition.partition < self._store.topic(partition.topic).partitions:
                raise UnknownTopic(f"{partition}: no such partition")
        self.offsets.append((membership, dict(offsets)))

    def records(self) -> dict[TopicPartition, list[OutRecord]]:
        """What was sent, by partition."""
        return {
            TopicPartition(name, partition): bucket
            for name, topic in self._topics.items()
            for partition, bucket in topic.buckets.items()
        }

    def _partition(self, record: OutRecord, topic: _Topic) -> int:
        """Where a record goes that names its partition or has no key."""
        if record.key is None and topic.compacted:
            raise InvalidRecord(f"{record.topic}: a record without key on a compacted topic")
        if record.partition is not None:
            if not 0 <= record.partition < topic.partitions:
                raise UnknownTopic(
                    f"{record.topic}[{record.partition}]: no such partition (valid: 0..{topic.partitions - 1})"
                )
            return record.partition
        turn = self._turns.get(record.topic, -1) + 1
        self._turns[record.topic] = turn
        return turn % topic.partitions

    def _refuse(self, record: OutRecord, topic: _Topic, size: int) -> None:
        if size > topic.max_bytes:
            raise RecordTooLarge(
                f"{record.topic}: a record of {size} bytes is above the topic's limit of {topic.max_bytes}"
            )
        raise Retryable(
            f"{record.topic}: the transaction would be above {self._max_bytes} bytes; commit it and begin another"
        )

    def _check_open(self) -> None:
        if not self.open:
            raise Fatal("the transaction is over; begin another")


class EmbeddedProducer:
    """Implements ``laminar.streams.log.Producer``."""

    def __init__(self, store: Store, transactional_id: str, *, request_timeout_s: float, max_bytes: int) -> None:
        self._store = store
        self._id = transactional_id
        self._timeout_s = request_timeout_s
        self._max_bytes = max_bytes
        self._turns: dict[str, int] = {}
        self._current: EmbeddedTransaction | None = None
        self._closed = False
        self._epoch = store.open_producer(transactional_id)

    @contextmanager
    def transaction(
        self,
        timeout_s: float | None = None,
        *,
        visible: bool = True,  # noqa: ARG002 - what is committed here is visible
    ) -> Iterator[EmbeddedTransaction]:
        """See ``laminar.streams.log.Producer.transaction``. ``timeout_s`` bounds the commit."""
        if self._closed:
            raise Fatal(f"producer {self._id}: closed")
        if self._current is not None:
            raise Fatal(f"producer {self._id}: a transaction is open already")
        transaction = self._current = EmbeddedTransaction(self._store, self._turns, self._max_bytes)
        try:
            yield transaction
            if not transaction.open:
                raise Fatal(f"producer {self._id}: closed inside its transaction")
            seconds = self._timeout_s if timeout_s is None else timeout_s
            commit = Commit(self._id, self._epoch, transaction.records(), transaction.offsets)
            self._store.commit(commit, Deadline.after(seconds, f"commit of {self._id}"))
        finally:
            transaction.open = False
            self._current = None

    def close(self) -> None:
        """Abort what is open. The id stays fenced for older producers."""
        if self._current is not None:
            self._current.open = False
        self._closed = True
