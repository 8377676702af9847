"""Takes records out of a librdkafka consumer and knows the position of every partition.

The position is ours, not librdkafka's: it is known from the moment of assignment, moves with the records that are
handed out, and passes control markers at the end of a partition (librdkafka's end-of-partition events carry it).

A pause is first ours alone: librdkafka throws away what it has fetched of a partition that it pauses, and fetches it
again afterwards, which costs more than most pauses last. What arrives of a paused partition is held here; only above
``_HOLD_BYTES`` librdkafka pauses it too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Fenced, OffsetOutOfRange
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.errors import error_of, translate
from laminar.streams.kafka.offsets import bounds_of
from laminar.streams.log import Bounds, LogRecord, TopicPartition

__all__ = ["Intake", "NameTaken"]

_log = logging.getLogger(__name__)

_MAX_POLL_BYTES = 8 * 1024 * 1024
"""What one take hands out; exceeded by less than one record."""
_HOLD_BYTES = 4 * 1024 * 1024
"""Of paused partitions, all together; exceeded by less than one record."""
_RECORD_BYTES = 200
"""What any record costs beside its key and value."""
_SEEK_S = 2.0
_PASSING = frozenset(
    {
        KafkaError._MAX_POLL_EXCEEDED,  # the rebalance callbacks that follow say the same
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError.UNKNOWN_MEMBER_ID,  # librdkafka joins again by itself
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
    }
)
_NAME_TAKEN = KafkaError(KafkaError.UNRELEASED_INSTANCE_ID).str()


class NameTaken(Fenced):
    """The group still has a member under this instance's name: one that lives, or that died within its session."""


class Intake:
    """The records and positions of one consumer."""

    def __init__(self, connection: Connection, client: Consumer, name: str, group: str | None = None) -> None:
        """``name`` stands in errors. ``group``: the one that it is a member of."""
        self.client = client
        self.positions: dict[TopicPartition, int] = {}
        self.on_no_offset: Callable[[TopicPartition], bool] = lambda _: False
        """Asked when a partition has no readable position: True = it has been dealt with."""
        self._connection = connection
        self._name = name
        self._group = group
        self._batch: list[LogRecord] = []
        self._ahead: dict[TopicPartition, int] = {}
        self._failure: BaseException | None = None
        self._paused: set[TopicPartition] = set()
        self._stopped: set[TopicPartition] = set()
        """Paused in librdkafka too."""
        self._held: dict[TopicPartition, deque[LogRecord | int]] = {}
        """What arrived of paused partitions: records, and ends of the partition as offsets."""
        self._held_bytes = 0

    def take(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``; empty when nothing came in time. Raises OffsetOutOfRange, UnknownTopic, Fenced."""
        end = time.monotonic() + timeout_s
        size = self._admit_held(max_records)
        wait = 0.0 if self._batch else timeout_s
        try:
            while len(self._batch) < max_records and size < _MAX_POLL_BYTES:
                message = self._poll(wait)
                if message is not None and message.error() is None:
                    size += self._admit(message)
                    wait = 0.0
                    if not self._batch and self._paused.issuperset(self.positions):
                        break  # a sign of life is all that was wanted: leave the rest where it is
                elif message is not None:
                    self._on_event(message)
                self._raise_failure()
                if message is None:
                    if self._batch or wait == 0.0:
                        break
                    wait = max(0.0, end - time.monotonic())
                elif not self._batch:
                    wait = max(0.0, end - time.monotonic())
        except BaseException:
            self._put_back()
            raise
        self.positions.update(self._ahead)
        batch, self._batch, self._ahead = self._batch, [], {}
        if not batch:
            self._connection.check_outage(self.client)
        return batch

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out nothing of these."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo pause."""
        freed = frozenset(partitions)
        self._paused -= freed
        self._start_again(freed)

    def fail(self, error: BaseException) -> None:
        """Let the current take raise this; it came up inside a callback."""
        self._failure = self._failure or error

    def start(self, positions: Mapping[TopicPartition, int]) -> None:
        """Positions of partitions that are being assigned."""
        self.positions.update(positions)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions that are not ours any more, with what the current take has of them: it was never handed out."""
        gone = frozenset(partitions)
        for partition in gone:
            self.positions.pop(partition, None)
        self._paused -= gone
        self._start_again(gone)
        self._forget(gone)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Take from this offset next; what was fetched ahead is dropped."""
        target = Partition(partition.topic, partition.partition, offset)
        self._forget({partition})
        deadline = Deadline.after(_SEEK_S, f"seek {partition}@{offset}")
        while True:
            try:
                self.client.seek(target)
                break
            except KafkaException as e:
                if error_of(e).code() != KafkaError._STATE:
                    raise self._connection.failed(e, f"seek {partition}@{offset}") from e
            if deadline.passed:  # not fetching: it has stopped at an error before, so begin afresh
                self.restart(partition, offset)
                return
            time.sleep(0.002)
        self.positions[partition] = offset

    def restart(self, partition: TopicPartition, offset: int) -> None:
        """Begin a partition afresh at this offset, whatever state its fetching is in."""
        self._start_again({partition})
        self._forget({partition})
        self.client.incremental_unassign([Partition(partition.topic, partition.partition)])
        self.client.incremental_assign([Partition(partition.topic, partition.partition, offset)])
        self.positions[partition] = offset

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range. Raises UnknownTopic."""
        return bounds_of(self.client, self._connection, partition)

    def _start_again(self, partitions: Set[TopicPartition]) -> None:
        """Undo librdkafka's own pause: it would outlive the assignment, and hold for the next one."""
        stopped = self._stopped & partitions
        if stopped:
            self._stopped -= stopped
            self.client.resume(_theirs(stopped))

    def _forget(self, partitions: Set[TopicPartition]) -> None:
        """Whatever is held, or the current take, inside which a callback runs, has of these partitions."""
        self._batch[:] = [record for record in self._batch if record.source not in partitions]
        for partition in partitions:
            self._ahead.pop(partition, None)
            for one in self._held.pop(partition, ()):
                self._held_bytes -= _size(one)

    def _poll(self, timeout_s: float) -> Message | None:
        try:
            return self.client.poll(timeout_s)
        except KafkaException as e:
            raise self._connection.failed(e, f"{self._name}: poll") from e

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _admit(self, message: Message) -> int:
        record = _record(message)
        source = record.source
        at = self._ahead.get(source, self.positions.get(source))
        held = self._held.get(source)
        if held:
            last = held[-1]
            at = last if isinstance(last, int) else last.offset + 1
        if at is None or record.offset < at:
            return 0
        if source in self._paused:
            self._hold(source, record)
            return 0
        self._batch.append(record)
        self._ahead[source] = record.offset + 1
        return _size(record)

    def _hold(self, partition: TopicPartition, one: LogRecord | int) -> None:
        self._held.setdefault(partition, deque()).append(one)
        self._held_bytes += _size(one)
        if self._held_bytes > _HOLD_BYTES:
            stop = (self._paused - self._stopped) & self.positions.keys()
            self._stopped |= stop
            self.client.pause(_theirs(stop))

    def _admit_held(self, max_records: int) -> int:
        """What was held of partitions that are not paused any more, before anything newer; the bytes."""
        size = 0
        for partition in [p for p in self._held if p not in self._paused]:
            held = self._held[partition]
            while held and len(self._batch) < max_records and size < _MAX_POLL_BYTES:
                one = held.popleft()
                self._held_bytes -= _size(one)
                size += _size(one)
                if isinstance(one, int):
                    self._ahead[partition] = max(self._ahead.get(partition, self.positions[partition]), one)
                else:
                    self._batch.append(one)
                    self._ahead[partition] = one.offset + 1
            if held:
                break
            del self._held[partition]
        return size

    def _put_back(self) -> None:
        """A take that fails hands out nothing: the next one begins with the same records."""
        taken = {record.source for record in self._batch}
        passed, self._batch, self._ahead = self._ahead, [], {}
        for partition, offset in passed.items():
            if partition in taken:
                self.seek(partition, self.positions[partition])
            else:
                self.positions[partition] = offset

    def _on_event(self, message: Message) -> None:
        error = message.error()
        topic, number, offset = message.topic(), message.partition(), message.offset()
        if error is None:
            return
        if topic is not None and number is not None:
            partition = TopicPartition(topic, number)
            if error.code() == KafkaError._PARTITION_EOF:
                if partition in self._held and offset is not None:
                    self._hold(partition, offset)
                elif partition in self.positions and offset is not None:
                    self._ahead[partition] = max(self._ahead.get(partition, self.positions[partition]), offset)
                return
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                if partition in self.positions and not self.on_no_offset(partition):
                    bounds = self.bounds(partition)
                    raise OffsetOutOfRange(
                        f"{self._name}: {partition}@{self.positions[partition]} is wanted, "
                        f"readable is {bounds.start} to {bounds.end}"
                    )
                return
        # the cause of a fatal error stands in its text only
        if error.code() == KafkaError._FATAL and _NAME_TAKEN in error.str():
            raise NameTaken(f"{self._name} on {self._connection.bootstrap}: {error.str()}")
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and self._group is None:
            return  # librdkafka looks for the coordinator of a group that does not matter to us
        if error.fatal() or (error.code() not in _PASSING and not error.retriable()):
            needs = f"READ on topic {topic}" if topic else f"READ on group {self._group}"
            raise translate(error, f"{self._name} on {self._connection.bootstrap}", needs=needs)
        _log.info("%s on %s: %s", self._name, self._connection.bootstrap, error.str())


def _theirs(partitions: Iterable[TopicPartition]) -> list[Partition]:
    return [Partition(p.topic, p.partition) for p in partitions]


def _size(one: LogRecord | int) -> int:
    return _RECORD_BYTES + (0 if isinstance(one, int) else len(one.key or b"") + len(one.value or b""))


def _record(message: Message) -> LogRecord:
    kind, timestamp = message.timestamp()
    return LogRecord(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=-1 if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value or b"") for name, value in _headers(message)),
    )


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    return message.headers() or []  # type: ignore[return-value]
