"""A transactional producer with a stable id.

How a transaction ends, in numbered steps:

1. Offsets go to the coordinator with the metadata of the member (KIP-447); a stale member is refused: Evicted.
2. Commit. What timed out is asked again, never done again, until the deadline.
3. The markers of a committed transaction are written a moment after the answer; wait for them (briefly: another
   producer's open transaction on the same partition may hold them back), so that what returned is visible.
4. An outcome that is still unknown at the deadline is settled before the next transaction begins, by initialising the
   id anew: the coordinator then either completes the commit that it had accepted, or aborts. Until then the group's
   committed offsets do not answer, so nobody can rewind to the wrong place.

Fenced stays Fenced. A transaction that outlives the transaction timeout is fenced by the broker in the same way, and a
client cannot tell the two apart: the process has to start again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import Producer as Client
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Aborted, Evicted, Fatal, Fenced, LaminarError, RecordTooLarge, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.consumer import Token
from laminar.streams.kafka.errors import error_of, translate
from laminar.streams.kafka.offsets import Offsets
from laminar.streams.log import Membership, OutRecord, TopicPartition, Transaction

__all__ = ["KafkaProducer"]

_log = logging.getLogger(__name__)

_VISIBLE_S = 1.0
_CLOSE_S = 2.0
_FRAMING = 100
"""Bytes that a record's own framing may add to a batch, generously."""


class KafkaProducer:
    """Implements ``laminar.streams.log.Producer``. Its construction fences every older one of the id."""

    def __init__(self, connection: Connection, admin: Admin, offsets: Offsets, transactional_id: str) -> None:
        self._connection = connection
        self._admin = admin
        self._offsets = offsets
        self._id = transactional_id
        self._client: Client | None = None
        self._fenced: str | None = None
        self._closed = False
        self._open = False
        self._groups: dict[str, object] = {}
        self._turn: Counter[str] = Counter()
        self._connect(connection.request_timeout_s)

    def transaction(self, timeout_s: float | None = None) -> AbstractContextManager[Transaction]:
        """See the port. Raises Aborted, Evicted, Fenced, Unavailable, DeadlineExceeded, and what the block raises."""
        return self._transaction(self._connection.request_timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Abort what is open and release the id."""
        self._closed = True
        client = self._client
        if client is not None:
            if self._open:
                self._abort(client, min(_CLOSE_S, self._connection.request_timeout_s))
            client.purge()
        self._client = None

    @contextmanager
    def _transaction(self, timeout_s: float) -> Iterator[Transaction]:
        if self._closed:
            raise Fatal(f"producer {self._id}: closed")
        if self._fenced is not None:
            raise Fenced(self._fenced)
        client = self._client or self._connect(timeout_s)
        try:
            client.begin_transaction()
        except KafkaException as e:
            raise self._ended(client, e, "begin") from e
        self._open = True
        transaction = _Transaction(self._admin, client, self._id, timeout_s, self._turn)
        try:
            yield transaction
        except BaseException:
            self._abort(client, timeout_s)
            raise
        self._commit(client, transaction, timeout_s)
        self._open = False

    def _connect(self, timeout_s: float) -> Client:
        client = self._connection.producer(self._id)
        deadline = Deadline.after(timeout_s, f"transactional id {self._id} is taken over")
        self._retried(client, lambda left: client.init_transactions(left), deadline)
        self._connection.answered()
        self._client = client
        return client

    def _commit(self, client: Client, transaction: _Transaction, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s, f"transaction of {self._id} commits")
        try:
            for membership, offsets in transaction.offsets:
                self._send_offsets(client, membership, offsets, deadline)
            self._retried(client, lambda left: client.commit_transaction(left), deadline, transaction)
        except (Aborted, Evicted, RecordTooLarge, UnknownTopic):
            self._abort(client, timeout_s)
            raise
        except BaseException:
            self._open = False
            if self._fenced is None:
                self._client = None  # unknown: step 4
            raise
        self._connection.answered()
        self._wait_until_visible(transaction.last)

    def _send_offsets(
        self, client: Client, membership: Membership, offsets: Mapping[TopicPartition, int], deadline: Deadline
    ) -> None:
        token = membership.token
        metadata = token.metadata if isinstance(token, Token) else self._without_members(membership.group)
        positions = [Partition(p.topic, p.partition, offset) for p, offset in offsets.items()]
        bounded = _Bounded(lambda left: client.send_offsets_to_transaction(positions, metadata, left))
        self._retried(client, bounded, deadline)

    def _without_members(self, group: str) -> object:
        """Group metadata that says: no member, no epoch."""
        if group not in self._groups:
            passing: Consumer = self._connection.member(group, None)
            self._groups[group] = passing.consumer_group_metadata()
            passing.close()
        return self._groups[group]

    def _retried(
        self,
        client: Client,
        call: Callable[[float], None],
        deadline: Deadline,
        transaction: _Transaction | None = None,
    ) -> None:
        """Call until it succeeds or fails for good; the deadline bounds it."""
        while True:
            try:
                call(max(0.05, deadline.remaining()))
                return
            except KafkaException as e:
                error = error_of(e)
                if error.retriable() and not error.txn_requires_abort() and not deadline.passed:
                    time.sleep(0.01)
                    continue
                if transaction is not None and transaction.refused is not None and not error.fatal():
                    raise translate(transaction.refused, f"transaction of {self._id}") from e
                raise self._ended(client, e, deadline.name) from e

    def _ended(self, client: Client, e: KafkaException, what: str) -> LaminarError:
        error = error_of(e)
        found = self._connection.failed(e, what if self._id in what else f"producer {self._id}: {what}", client=client)
        if isinstance(found, Fenced):
            self._fenced = (
                f"producer {self._id}: fenced: a newer owner of this transactional id exists, or its transaction "
                f"outlived the transaction timeout ({error.name()})"
            )
            return Fenced(self._fenced)
        if error.txn_requires_abort() and not isinstance(found, (Evicted, RecordTooLarge, UnknownTopic)):
            return Aborted(str(found))
        return found

    def _abort(self, client: Client, timeout_s: float) -> None:
        """Never raises: what cannot be aborted now is aborted before the next transaction begins."""
        self._open = False
        if self._fenced is not None or (self._closed and self._client is None):
            return
        try:
            deadline = Deadline.after(timeout_s, f"transaction of {self._id} aborts")
            self._retried(client, lambda left: client.abort_transaction(left), deadline)
        except LaminarError as e:
            self._client = None
            _log.warning("%s", e)

    def _wait_until_visible(self, last: Mapping[TopicPartition, int]) -> None:
        deadline = Deadline.after(_VISIBLE_S, f"transaction of {self._id} is visible")
        waiting = dict(last)
        while waiting and not deadline.passed:
            try:
                bounds = self._offsets.bounds(waiting)
            except LaminarError as e:
                _log.info("%s", e)
                return
            waiting = {p: offset for p, offset in waiting.items() if bounds[p].end <= offset}
            if waiting:
                time.sleep(0.002)


class _Bounded:
    """A call that may exceed its timeout (librdkafka lets it wait for the transaction timeout), on its own thread.

    A call that is late is abandoned together with its client; nothing else uses that client any more.
    """

    def __init__(self, call: Callable[[float], None]) -> None:
        self._call = call

    def __call__(self, timeout_s: float) -> None:
        ended: list[BaseException | None] = []

        def run() -> None:
            try:
                self._call(timeout_s)
                ended.append(None)
            except BaseException as e:  # noqa: BLE001 - raised again by the caller's thread
                ended.append(e)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not ended:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if ended[0] is not None:
            raise ended[0]


class _Transaction:
    """Implements ``laminar.streams.log.Transaction``."""

    def __init__(self, admin: Admin, client: Client, name: str, timeout_s: float, turn: Counter[str]) -> None:
        self.offsets: list[tuple[Membership, dict[TopicPartition, int]]] = []
        self.last: dict[TopicPartition, int] = {}
        """Last offset written per partition."""
        self.refused: KafkaError | None = None
        """Why the first record that could not be written could not."""
        self._admin = admin
        self._client = client
        self._name = name
        self._timeout_s = timeout_s
        self._turn = turn
        self._unflushed: Counter[str] = Counter()

    def send(self, record: OutRecord) -> None:
        """Add a record. Raises RecordTooLarge, UnknownTopic, DeadlineExceeded (the broker is slower than we are)."""
        facts = self._admin.facts(record.topic)
        partition = record.partition
        if partition is None and record.key is None:
            partition = self._turn[record.topic] % facts.partitions
            self._turn[record.topic] += 1
        if partition is not None and not 0 <= partition < facts.partitions:
            raise UnknownTopic(f"{record.topic}[{partition}]: no such partition (the topic has {facts.partitions})")
        size = len(record.key or b"") + len(record.value or b"") + sum(len(n) + len(v) for n, v in record.headers)
        if size > facts.max_record_bytes:
            raise RecordTooLarge(
                f"{record.topic}: a record of {size} bytes is above the topic's limit of {facts.max_record_bytes}"
            )
        self._keep_batches_small(record.topic, size + _FRAMING, facts.max_record_bytes)
        deadline = Deadline.after(self._timeout_s, f"producer {self._name}: room in the send queue")
        while True:
            try:
                self._client.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    partition=-1 if partition is None else partition,
                    timestamp=0 if record.timestamp_ms is None else record.timestamp_ms,
                    headers=list(record.headers),
                    on_delivery=self._delivered,
                )
                self._client.poll(0)
                return
            except BufferError:
                deadline.check()
                self._client.poll(min(0.1, deadline.remaining()))
            except KafkaException as e:
                raise translate(error_of(e), f"producer {self._name}: send to {record.topic}") from e

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit, together with the records, the next offset to read of each partition. Raises Evicted."""
        token = membership.token
        if isinstance(token, Token):
            lost = sorted(map(str, offsets.keys() - token.owned))
            if lost:
                raise Evicted(f"group {membership.group}: {', '.join(lost)}: not assigned to this member")
        self.offsets.append((membership, dict(offsets)))

    def _keep_batches_small(self, topic: str, size: int, limit: int) -> None:
        """A broker refuses a batch above the topic's limit, even where each record is below it."""
        if limit >= 1_000_000:
            return
        if self._unflushed[topic] + size > limit:
            self._client.flush(self._timeout_s)
            self._unflushed[topic] = 0
        self._unflushed[topic] += size

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is not None:
            if self.refused is None and error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
                self.refused = error
            if topic is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                self._admin.forget(topic)
        elif topic is not None and partition is not None and offset is not None:
            where = TopicPartition(topic, partition)
            self.last[where] = max(self.last.get(where, -1), offset)
