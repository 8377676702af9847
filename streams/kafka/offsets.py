"""Offsets as seen from outside a group: committed ones, and the readable range of partitions.

Asked through consumers that never subscribe. librdkafka's admin client (2.16) would do it too, but it aborts the
process when an answer to ``list_consumer_group_offsets`` comes after the timeout, and passes -1001 off as an offset
when one to ``list_offsets`` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Unavailable, UnknownTopic
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.errors import error_of
from laminar.streams.log import Bounds, TopicPartition

__all__ = ["Offsets", "bounds_of"]

_STABLE_S = 2.0
_MAX_CLIENTS = 32
_LEADER_MOVES = frozenset(
    {
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
    }
)
_ATTEMPTS = 20

Isolation = Literal["read_committed", "read_uncommitted"]


def bounds_of(client: Consumer, connection: Connection, partition: TopicPartition) -> Bounds:
    """Readable range of one partition, up to the last stable offset. Raises UnknownTopic, Unavailable."""
    asked = Partition(partition.topic, partition.partition)
    for attempt in range(_ATTEMPTS):
        try:
            low, high = client.get_watermark_offsets(asked, timeout=connection.request_timeout_s)
            break
        except KafkaException as e:
            if attempt == _ATTEMPTS - 1 or error_of(e).code() not in _LEADER_MOVES:
                raise connection.failed(e, f"{partition}: bounds") from e
            connection.refresh(client)
    connection.answered()
    return Bounds(low, high)


class Offsets:
    """One per KafkaLog; keeps its clients."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lookup: Consumer | None = None
        self._groups: dict[tuple[str, Isolation], Consumer] = {}

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Readable ranges. Raises UnknownTopic, Unavailable."""
        if self._lookup is None:
            self._lookup = self._connection.reader()
        return {p: bounds_of(self._lookup, self._connection, p) for p in partitions}

    def committed(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """A group's offsets, after transactions that are just being settled; not held up by one that stays open."""
        asked = [Partition(p.topic, p.partition) for p in partitions]
        timeout_s = self._connection.request_timeout_s
        stable_s = min(_STABLE_S, timeout_s / 2)
        try:
            found = self._client(group, "read_committed").committed(asked, timeout=stable_s)
        except KafkaException:
            try:
                found = self._client(group, "read_uncommitted").committed(asked, timeout=timeout_s - stable_s)
            except KafkaException as e:
                raise self._connection.failed(e, f"offsets of group {group}") from e
        self._connection.answered()
        for p in found:
            if p.error is not None:
                kind = UnknownTopic if p.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART else Unavailable
                raise kind(f"offsets of group {group}: {p.topic}[{p.partition}]: {p.error.str()}")
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def close(self) -> None:
        """Disconnect."""
        for client in [*self._groups.values(), *([self._lookup] if self._lookup else [])]:
            client.close()
        self._groups, self._lookup = {}, None

    def _client(self, group: str, isolation: Isolation) -> Consumer:
        key = group, isolation
        if key not in self._groups:
            if len(self._groups) >= _MAX_CLIENTS:
                self._groups.pop(next(iter(self._groups))).close()
            self._groups[key] = self._connection.onlooker(group, isolation)
        return self._groups[key]
