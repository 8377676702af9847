"""Offsets as seen from outside a group: committed ones, and the readable range of partitions.

Asked through consumers that never subscribe. librdkafka's admin client (2.16) would do it too, but it aborts the
process when an answer to ``list_consumer_group_offsets`` comes after the timeout, and passes -1001 off as an offset
when one to ``list_offsets`` does. (``Admin.readable_ends`` asks it where that may count as no answer.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Retryable, Unavailable, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.errors import translate
from laminar.streams.log import Bounds, TopicPartition

__all__ = ["Offsets", "bounds_of"]

_STABLE_S = 2.0
_MAX_CLIENTS = 32
Isolation = Literal["read_committed", "read_uncommitted"]


def bounds_of(client: Consumer, connection: Connection, partition: TopicPartition) -> Bounds:
    """Readable range of one partition, up to the last stable offset. Raises UnknownTopic, Unavailable."""
    asked, what = Partition(partition.topic, partition.partition), f"{partition}: bounds"
    deadline = Deadline.after(connection.request_timeout_s, what)
    while True:
        try:
            low, high = connection.ask(lambda left: client.get_watermark_offsets(asked, timeout=left), what, client)
        except UnknownTopic:
            # librdkafka says so too of a partition whose leader it has just lost: only a broker knows.
            if not _exists(client, connection, partition):
                raise
            deadline.check("its leader is not known")
            time.sleep(0.05)
        else:
            return Bounds(low, high)


def _exists(client: Consumer, connection: Connection, partition: TopicPartition) -> bool:
    """What a broker says. Raises Unavailable when none answers."""
    found = connection.ask(
        lambda left: client.list_topics(partition.topic, timeout=left), f"{partition.topic}: partitions", client
    ).topics[partition.topic]
    if found.error is not None:
        return bool(found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART)
    return partition.partition in found.partitions


class Offsets:
    """One per KafkaLog; keeps its clients."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lookup: Consumer | None = None
        self._groups: dict[tuple[str, Isolation], Consumer] = {}

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Readable ranges. Raises UnknownTopic, Unavailable."""
        lookup = self._lookup
        if lookup is None:
            lookup = self._lookup = self._connection.reader()
        return {p: bounds_of(lookup, self._connection, p) for p in partitions}

    def committed(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """A group's offsets, after transactions that are just being settled; not held up by one that stays open."""
        asked = [Partition(p.topic, p.partition) for p in partitions]
        what = f"offsets of group {group}"
        stable_s = min(_STABLE_S, self._connection.request_timeout_s / 2)
        try:
            stable = self._client(group, "read_committed")
            found = self._connection.ask(
                lambda left: stable.committed(asked, timeout=left), what, stable, timeout_s=stable_s
            )
        except Retryable:
            self._raise_if_forbidden(stable, group)
            client = self._client(group, "read_uncommitted")
            found = self._connection.ask(lambda left: client.committed(asked, timeout=left), what, client)
        for p in found:
            if p.error is not None:
                kind = UnknownTopic if p.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART else Unavailable
                raise kind(f"offsets of group {group}: {p.topic}[{p.partition}]: {p.error.str()}")
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def _raise_if_forbidden(self, client: Consumer, group: str) -> None:
        """librdkafka lets a call time out for which the permission is missing; only an event says why."""
        while (message := client.poll(0)) is not None:
            error = message.error()
            if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                where = f"offsets of group {group} on {self._connection.bootstrap}"
                raise translate(error, where, needs=f"DESCRIBE on group {group}")

    def close(self) -> None:
        """Disconnect."""
        for client in self._groups.values():
            client.close()
        # Only let go of: a transaction beside the steps may be inside it, and its last user destroys it.
        self._groups, self._lookup = {}, None

    def _client(self, group: str, isolation: Isolation) -> Consumer:
        key = group, isolation
        if key not in self._groups:
            if len(self._groups) >= _MAX_CLIENTS:
                self._groups.pop(next(iter(self._groups))).close()
            self._groups[key] = self._connection.onlooker(group, isolation)
        return self._groups[key]
