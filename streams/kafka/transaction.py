"""An open transaction: what is in it, and how much of it waits to be sent.

Only one that is to be ``visible`` has its records' offsets reported: each report takes the interpreter's lock from
whoever has it, such as an engine that decodes beside this. What a broker refuses, a commit says, before it is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import Producer as Client

from laminar.schemas.errors import Aborted, Evicted, Fatal, LaminarError, RecordTooLarge, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.consumer import Token
from laminar.streams.kafka.errors import error_of, translate
from laminar.streams.log import Membership, OutRecord, TopicPartition
from laminar.streams.partitioner import partition_of

__all__ = ["KafkaTransaction", "callbacks"]

_FRAMING = 100
"""Bytes that a record's own framing may add to a batch, generously."""
_POLLED = 64
"""After so many records librdkafka may call back."""


@contextmanager
def callbacks() -> Iterator[None]:
    """Around what runs callbacks: one that runs while a fatal error is on its way hides it in a SystemError."""
    try:
        yield
    except SystemError as e:
        cause = e.__cause__
        raise (
            cause if isinstance(cause, KafkaException) else KafkaException(KafkaError(KafkaError._FAIL, str(e)))
        ) from e


class KafkaTransaction:
    """Implements ``laminar.streams.log.Transaction``."""

    def __init__(
        self, admin: Admin, client: Client, name: str, timeout_s: float, turn: Counter[str], *, visible: bool
    ) -> None:
        self.offsets: list[tuple[Membership, dict[TopicPartition, int]]] = []
        self.last: dict[TopicPartition, int] = {}
        """Last offset written per partition, if it is to be visible."""
        self.broken = False
        """The client is of no use any more; why, only the end of the transaction says."""
        self._admin = admin
        self._client = client
        self._name = name
        self._timeout_s = timeout_s
        self._turn = turn
        self._topics: set[str] = set()
        self._n_sent = 0
        self._reported: dict[str, Any] = {"on_delivery": self._delivered} if visible else {}
        self._unflushed: Counter[str] = Counter()

    def send(self, record: OutRecord) -> None:
        """Add a record. Raises RecordTooLarge, UnknownTopic, DeadlineExceeded (the broker is slower than we are)."""
        facts = self._admin.facts(record.topic, needs="WRITE")
        partition = record.partition
        if partition is None and record.key is None:
            partition = self._turn[record.topic] % facts.spread
            self._turn[record.topic] += 1
        elif partition is None and record.key is not None:
            partition = partition_of(record.key, facts.spread)  # librdkafka's own would follow added partitions
        if partition is not None and not 0 <= partition < facts.partitions:
            raise UnknownTopic(f"{record.topic}[{partition}]: no such partition (the topic has {facts.partitions})")
        size = len(record.key or b"") + len(record.value or b"") + sum(len(n) + len(v) for n, v in record.headers)
        if size > facts.max_record_bytes:
            raise RecordTooLarge(
                f"{record.topic}: a record of {size} bytes is above the topic's limit of {facts.max_record_bytes}"
            )
        self._topics.add(record.topic)
        deadline = Deadline.after(self._timeout_s, f"producer {self._name}: room in the send queue")
        while True:
            try:
                with callbacks():
                    self._keep_batches_small(record.topic, size + _FRAMING, facts.max_record_bytes)
                    self._client.produce(
                        record.topic,
                        value=record.value,
                        key=record.key,
                        partition=-1 if partition is None else partition,
                        timestamp=0 if record.timestamp_ms is None else record.timestamp_ms,
                        headers=list(record.headers),
                        **self._reported,
                    )
                    self._n_sent += 1
                    if not self._n_sent % _POLLED:
                        self._client.poll(0)
                return
            except BufferError:
                deadline.check()
                with suppress(KafkaException), callbacks():  # what is wrong, produce says
                    self._client.poll(min(0.1, deadline.remaining()))
            except KafkaException as e:
                error = error_of(e)
                if error.code() == KafkaError._STATE:
                    raise self._failure(error) from e
                self.broken = error.code() == KafkaError._FATAL
                raise translate(error, f"producer {self._name}: send to {record.topic}") from e

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit, together with the records, the next offset to read of each partition. Raises Evicted."""
        token = membership.token
        if isinstance(token, Token):
            lost = sorted(map(str, offsets.keys() - token.owned))
            if lost:
                raise Evicted(f"group {membership.group}: {', '.join(lost)}: not assigned to this member")
        self.offsets.append((membership, dict(offsets)))

    def forget(self) -> None:
        """A broker refused something: what is remembered of the topics may not be true any more."""
        for topic in self._topics:
            self._admin.forget(topic)

    def _failure(self, error: KafkaError) -> LaminarError:
        """Why it can take nothing any more. Only a commit says, which is refused before it reaches a broker."""
        self.forget()
        try:
            with callbacks():
                self._client.commit_transaction(self._timeout_s)
        except KafkaException as e:
            error = error_of(e)
        found = translate(error, f"transaction of {self._name}")
        return found if isinstance(found, Fatal) else Aborted(str(found))

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
        if error is None and topic is not None and partition is not None and offset is not None:
            where = TopicPartition(topic, partition)
            self.last[where] = max(self.last.get(where, -1), offset)
