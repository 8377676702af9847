"""A transactional producer over any store: a transaction is kept in memory and made visible in one go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from laminar.schemas.errors import Fatal, InvalidRecord, RecordTooLarge, Retryable, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.embedded.store import Commit, Pending, Store
from laminar.streams.log import Membership, OutRecord, TopicPartition
from laminar.streams.partitioner import partition_of

__all__ = ["EmbeddedProducer", "EmbeddedTransaction", "record_bytes"]


def record_bytes(key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes], ...]) -> int:
    """What counts against ``max_record_bytes``: key, value and headers."""
    size = len(key or b"") + len(value or b"")
    return size + sum(len(name.encode()) + len(content) for name, content in headers) if headers else size


class EmbeddedTransaction:
    """Implements ``laminar.streams.log.Transaction``."""

    def __init__(self, store: Store, turns: dict[str, int], max_bytes: int) -> None:
        self._store = store
        self._turns = turns
        self._left = max_bytes
        self._max_bytes = max_bytes
        self.open = True
        self.records: list[Pending] = []
        self.offsets: list[tuple[Membership, Mapping[TopicPartition, int]]] = []

    def send(self, record: OutRecord) -> None:
        """Add a record. Raises RecordTooLarge, UnknownTopic, Retryable (the transaction is full)."""
        self._check_open()
        spec = self._store.topic(record.topic)
        size = record_bytes(record.key, record.value, record.headers)
        if size > spec.max_record_bytes:
            raise RecordTooLarge(
                f"{record.topic}: a record of {size} bytes is above the topic's limit of {spec.max_record_bytes}"
            )
        if record.key is None and spec.cleanup != "delete":
            raise InvalidRecord(f"{record.topic}: a record without key on a compacted topic")
        if size > self._left:
            raise Retryable(
                f"{record.topic}: the transaction would be above {self._max_bytes} bytes; commit it and begin another"
            )
        self._left -= size
        timestamp = record.timestamp_ms if record.timestamp_ms is not None else int(self._store.now() * 1000)
        target = TopicPartition(record.topic, self._partition(record, spec.partitions))
        self.records.append(Pending(target, timestamp, record.key, record.value, record.headers))

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit these together with the records."""
        self._check_open()
        for partition in offsets:
            if not 0 <= partition.partition < self._store.topic(partition.topic).partitions:
                raise UnknownTopic(f"{partition}: no such partition")
        self.offsets.append((membership, dict(offsets)))

    def _partition(self, record: OutRecord, partitions: int) -> int:
        if record.partition is not None:
            if not 0 <= record.partition < partitions:
                raise UnknownTopic(
                    f"{record.topic}[{record.partition}]: no such partition (valid: 0..{partitions - 1})"
                )
            return record.partition
        if record.key is not None:
            return partition_of(record.key, partitions)
        turn = self._turns.get(record.topic, -1) + 1
        self._turns[record.topic] = turn
        return turn % partitions

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
    def transaction(self, timeout_s: float | None = None) -> Iterator[EmbeddedTransaction]:
        """See ``laminar.streams.log.Producer.transaction``. ``timeout_s`` bounds the commit."""
        if self._closed:
            raise Fatal(f"producer {self._id}: closed")
        if self._current is not None:
            raise Fatal(f"producer {self._id}: a transaction is open already")
        self._store.check_producer(self._id, self._epoch)
        transaction = self._current = EmbeddedTransaction(self._store, self._turns, self._max_bytes)
        try:
            yield transaction
            if not transaction.open:
                raise Fatal(f"producer {self._id}: closed inside its transaction")
            seconds = self._timeout_s if timeout_s is None else timeout_s
            commit = Commit(self._id, self._epoch, transaction.records, transaction.offsets)
            self._store.commit(commit, Deadline.after(seconds, f"commit of {self._id}"))
        finally:
            transaction.open = False
            self._current = None

    def close(self) -> None:
        """Abort what is open. The id stays fenced for older producers."""
        if self._current is not None:
            self._current.open = False
        self._closed = True
