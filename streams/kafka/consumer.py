"""A member of a consumer group.

``group_protocol="consumer"`` (KIP-848): every member is dynamic. A member that leaves hands over at once, one that is
killed after the group's session timeout (a broker setting). ``instance`` is the client id.

``group_protocol="classic"``: cooperative; with an ``instance`` the member is static (KIP-345): a restarted process
takes over its own partitions at once and the process that it replaced is Fenced, but partitions of one that leaves for
good stay with it until the session timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Evicted, Fatal
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.intake import Intake
from laminar.streams.log import LogRecord, Membership, RebalanceCallback, TopicPartition

__all__ = ["KafkaConsumer", "Token"]

_log = logging.getLogger(__name__)

_COMMITTED_S = 2.0
_STORED = -1000
"""librdkafka's own wait for the committed offset."""


@dataclass(frozen=True, slots=True)
class Token:
    """What a KafkaConsumer puts into its Membership."""

    metadata: Any
    owned: frozenset[TopicPartition]
    """The broker fences old epochs; that a current member commits only what it owns is checked here."""


class KafkaConsumer:
    """Implements ``laminar.streams.log.Consumer``."""

    def __init__(
        self,
        connection: Connection,
        admin: Admin,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None,
        on_assign: RebalanceCallback | None,
        on_revoke: RebalanceCallback | None,
    ) -> None:
        for topic in topics:
            admin.facts(topic)
        self._connection = connection
        self._group = group
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._paused: set[TopicPartition] = set()
        self._starting: dict[TopicPartition, int] = {}
        self._closed = False
        client = connection.member(group, instance)
        self._intake = Intake(connection, client, f"group {group}" + (f", {instance}" if instance else ""))
        self._intake.on_no_offset = self._begin_without_offset
        client.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``, in order per partition. Raises OffsetOutOfRange, Fenced, Unavailable."""
        if self._closed:
            raise Fatal(f"group {self._group}: the consumer is closed")
        return self._intake.take(max_records, timeout_s)

    def assignment(self) -> frozenset[TopicPartition]:
        """As of the last poll."""
        return frozenset(self._intake.positions)

    def position(self) -> dict[TopicPartition, int]:
        """Next offset that poll will return, per owned partition."""
        return {p: offset for p, offset in self._intake.positions.items() if offset >= 0}

    def committed(self) -> dict[TopicPartition, int]:
        """The group's committed offsets of the owned partitions; waits for a transaction that holds them open."""
        partitions = _theirs(self._intake.positions)
        if not partitions:
            return {}
        client = self._intake.client
        found = self._connection.ask(
            lambda left: client.committed(partitions, timeout=left), f"group {self._group}: committed offsets", client
        )
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next. Raises Evicted when the partition is not owned."""
        if partition in self._starting:
            self._starting[partition] = offset
        elif partition in self._intake.positions:
            self._intake.seek(partition, offset)
        else:
            raise Evicted(f"group {self._group}: seek {partition}: not assigned to this member")

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        """Stop returning records of these partitions; membership goes on."""
        held = partitions & (self._intake.positions.keys() | self._starting.keys()) - self._paused
        self._paused |= held
        if held - self._starting.keys():
            self._intake.client.pause(_theirs(held - self._starting.keys()))

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        """Undo pause."""
        freed = self._paused & partitions
        self._paused -= freed
        if freed - self._starting.keys():
            self._intake.client.resume(_theirs(freed - self._starting.keys()))

    def membership(self) -> Membership:
        """Proof of membership as of now."""
        return Membership(self._group, Token(self._intake.client.consumer_group_metadata(), self.assignment()))

    def close(self) -> None:
        """Leave the group at once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._intake.client.close()
        except (KafkaException, RuntimeError) as e:
            _log.warning("group %s: close: %s", self._group, e)
        self._intake.drop(self.assignment())

    def _assigned(self, client: Consumer, partitions: list[Partition]) -> None:
        ours = frozenset(TopicPartition(p.topic, p.partition) for p in partitions)
        self._starting = self._first_offsets(client, partitions)
        self._intake.start(self._starting)
        self._call(self._on_assign, ours)
        start, self._starting = self._starting, {}
        client.incremental_assign([Partition(p.topic, p.partition, offset) for p, offset in start.items()])
        self._intake.start(start)
        if self._paused & ours:
            client.pause(_theirs(self._paused & ours))

    def _revoked(self, client: Consumer, partitions: list[Partition]) -> None:
        ours = frozenset(TopicPartition(p.topic, p.partition) for p in partitions)
        if not self._closed:
            self._call(self._on_revoke, ours)
        self._intake.drop(ours)
        self._paused -= ours
        client.incremental_unassign(partitions)

    def _call(self, callback: RebalanceCallback | None, partitions: frozenset[TopicPartition]) -> None:
        """The rebalance goes on whatever the callback does; what it raises, poll raises."""
        if callback is None or not partitions:
            return
        try:
            callback(partitions)
        except BaseException as e:  # noqa: BLE001 - raised again by poll, once librdkafka is out of its callback
            self._intake.fail(e)

    def _first_offsets(self, client: Consumer, partitions: list[Partition]) -> dict[TopicPartition, int]:
        """Where to begin: the committed offset, or the beginning; librdkafka waits where that is held open."""
        if not partitions:
            return {}
        wait_s = min(_COMMITTED_S, self._connection.request_timeout_s)
        try:
            found = client.committed(partitions, timeout=wait_s)
            return {
                TopicPartition(p.topic, p.partition): p.offset
                if p.offset >= 0
                else client.get_watermark_offsets(p, timeout=wait_s)[0]
                for p in found
            }
        except KafkaException as e:
            _log.info("group %s: no committed offsets yet: %s", self._group, e)
            return {TopicPartition(p.topic, p.partition): _STORED for p in partitions}

    def _begin_without_offset(self, partition: TopicPartition) -> bool:
        """librdkafka waited for a committed offset and found none: begin at the beginning."""
        if self._intake.positions.get(partition, 0) != _STORED:
            return False
        self._intake.restart(partition, self._intake.bounds(partition).start)
        return True


def _theirs(partitions: Iterable[TopicPartition]) -> list[Partition]:
    return [Partition(p.topic, p.partition) for p in partitions]
