"""Reads partitions that it chose itself, outside any group."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Fatal, OffsetOutOfRange, UnknownTopic
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.intake import Intake
from laminar.streams.log import Bounds, LogRecord, TopicPartition

__all__ = ["KafkaReader"]

_VERIFY_S = 2.0


class KafkaReader:
    """Implements ``laminar.streams.log.Reader``."""

    def __init__(self, connection: Connection, admin: Admin, *, fetch_wait_ms: int = 100) -> None:
        self._connection = connection
        self._admin = admin
        self._intake = Intake(connection, connection.reader(fetch_wait_ms=fetch_wait_ms), "reader")
        self._unchecked: frozenset[TopicPartition] = frozenset()
        self._closed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, each from the given offset."""
        self._intake.drop(list(self._intake.positions))
        self._intake.start(positions)
        self._unchecked = frozenset(positions)
        self._intake.client.assign([Partition(p.topic, p.partition, offset) for p, offset in positions.items()])

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``. Raises OffsetOutOfRange, UnknownTopic, Unavailable."""
        if self._closed:
            raise Fatal("the reader is closed")
        self._check()
        self._admin.watch.look()
        if not self._intake.positions:
            return []
        try:
            return self._intake.take(max_records, timeout_s)
        except (OffsetOutOfRange, UnknownTopic):
            self._admin.watch.verify({p.topic for p in self._intake.positions}, _VERIFY_S)  # another topic by now?
            raise

    def position(self) -> dict[TopicPartition, int]:
        """Next offset per assigned partition."""
        return dict(self._intake.positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next."""
        if partition not in self._intake.positions:
            raise UnknownTopic(f"reader: seek {partition}: not assigned")
        self._intake.seek(partition, offset)

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range as of now. Raises UnknownTopic."""
        return self._intake.bounds(partition)

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """First offset whose timestamp is at least this; Bounds.end if there is none."""
        asked = [Partition(partition.topic, partition.partition, max(0, timestamp_ms))]
        client = self._intake.client
        (found,) = self._connection.ask(
            lambda left: client.offsets_for_times(asked, timeout=left), f"{partition}: offset at {timestamp_ms}", client
        )
        return found.offset if found.offset >= 0 else self.bounds(partition).end

    def close(self) -> None:
        """Release the connection."""
        if not self._closed:
            self._closed = True
            self._intake.client.close()

    def _check(self) -> None:
        """librdkafka waits for topics that are not there; we do not."""
        for partition in self._unchecked:
            known = self._admin.facts(partition.topic, needs="READ").partitions
            if partition.partition >= known:
                self._admin.forget(partition.topic)  # some may have been added
                known = self._admin.facts(partition.topic, needs="READ").partitions
            if not 0 <= partition.partition < known:
                raise UnknownTopic(f"{partition}: no such partition (the topic has {known})")
        self._unchecked = frozenset()
