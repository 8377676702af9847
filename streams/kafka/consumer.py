"""A member of a consumer group.

``group_protocol="consumer"`` (KIP-848): with an ``instance`` it is a static member. One that closes keeps its
partitions for the next process of that name, until the session timeout; nobody else's move. While the group has a
member of this name, another is refused: after a kill -9 that is until the broker's session timeout, so a new process
keeps asking for so long; one that was a member before and is refused has been replaced: Fenced. Without an
``instance`` it is dynamic.

``group_protocol="classic"``: cooperative, and every member is dynamic: ``instance`` is the client id. (A static one
that dies between the two rounds of a cooperative rebalance gets its old assignment back without a second round, and
the partitions that it had given up are nobody's from then on.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Evicted, Fatal, LaminarError, OffsetOutOfRange, Unavailable, UnknownTopic
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.intake import Intake, NameTaken
from laminar.streams.log import LogRecord, Membership, RebalanceCallback, TopicPartition

__all__ = ["KafkaConsumer", "Token"]

_log = logging.getLogger(__name__)

_COMMITTED_S = 2.0
_VERIFY_S = 2.0
_NAME_S = 90.0
"""Longer than any session that a broker grants by default."""
_ASK_AGAIN_S = 0.5
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
            admin.facts(topic, needs="READ")
        self._connection = connection
        self._watch = admin.watch
        self._group = group
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._starting: dict[TopicPartition, int] = {}
        self._closed = False
        self._topics = list(topics)
        self._instance = instance
        self._joined = False
        self._taken_since: float | None = None
        self._ask_again = 0.0
        self._waiting_since: float | None = None
        client = connection.member(group, instance)
        self._intake = Intake(connection, client, f"group {group}" + (f", {instance}" if instance else ""), group)
        self._intake.on_no_offset = self._begin_without_offset
        self._subscribe(client)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``, in order per partition. Raises OffsetOutOfRange, Fenced, Unavailable."""
        if self._closed:
            raise Fatal(f"group {self._group}: the consumer is closed")
        if self._ask_again and not self._join_again(timeout_s):
            return []
        self._watch.look()
        try:
            batch = self._intake.take(max_records, timeout_s)
            self._check_begun()
            return batch
        except NameTaken as taken:
            self._wait_for_name(taken)
            return []
        except (OffsetOutOfRange, UnknownTopic):
            self._watch.verify(self._topics, _VERIFY_S)  # it may be another topic by now
            raise

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
        self._intake.pause(partitions & (self._intake.positions.keys() | self._starting.keys()))

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        """Undo pause."""
        self._intake.resume(partitions)

    def membership(self) -> Membership:
        """Proof of membership as of now."""
        return Membership(self._group, Token(self._intake.client.consumer_group_metadata(), self.assignment()))

    def close(self) -> None:
        """Leave the group at once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._intake.resume(self.assignment())  # while there is a client
            self._intake.client.close()
        except (KafkaException, RuntimeError) as e:
            _log.warning("group %s: close: %s", self._group, e)
        self._intake.drop(self.assignment())

    def _assigned(self, client: Consumer, partitions: list[Partition]) -> None:
        ours = frozenset(TopicPartition(p.topic, p.partition) for p in partitions)
        self._joined = True
        try:
            self._watch.verify({p.topic for p in partitions}, _VERIFY_S)
        except LaminarError as e:
            self._intake.fail(e)
        self._starting = self._first_offsets(client, partitions)
        self._intake.start(self._starting)
        self._call(self._on_assign, ours)
        start, self._starting = self._starting, {}
        client.incremental_assign([Partition(p.topic, p.partition, offset) for p, offset in start.items()])
        self._intake.start(start)

    def _revoked(self, client: Consumer, partitions: list[Partition]) -> None:
        ours = frozenset(TopicPartition(p.topic, p.partition) for p in partitions)
        if not self._closed:
            self._call(self._on_revoke, ours)
        self._intake.drop(ours)
        client.incremental_unassign(partitions)

    def _lost(self, client: Consumer, partitions: list[Partition]) -> None:
        """As revoked, but others may own them already: nothing of them can be committed, assignment() says so."""
        self._intake.drop(TopicPartition(p.topic, p.partition) for p in partitions)
        self._revoked(client, partitions)

    def _subscribe(self, client: Consumer) -> None:
        client.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def _wait_for_name(self, taken: NameTaken) -> None:
        """Raise ``taken``, or plan to ask again: librdkafka does not do that by itself."""
        now = time.monotonic()
        if self._taken_since is None:
            self._taken_since = now
            _log.warning("%s: waiting for the end of its session", taken)
        if self._joined or now - self._taken_since > _NAME_S:
            raise taken
        self._intake.client.close()
        self._ask_again = now + _ASK_AGAIN_S

    def _join_again(self, timeout_s: float) -> bool:
        """Whether there is a client again."""
        wait_s = self._ask_again - time.monotonic()
        time.sleep(max(0.0, min(wait_s, timeout_s)))
        if wait_s > timeout_s:
            return False
        self._ask_again = 0.0
        self._intake.client = self._connection.member(self._group, self._instance)
        self._subscribe(self._intake.client)
        return True

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

    def _check_begun(self) -> None:
        """Unavailable when librdkafka still waits for committed offsets that must have been settled by now.

        The next poll raises it: this one may have records to hand out.
        """
        waiting = [p for p, offset in self._intake.positions.items() if offset == _STORED]
        if not waiting:
            self._waiting_since = None
            return
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        settings = self._connection.settings
        waited_s = now - self._waiting_since
        if waited_s > settings.transaction_timeout_s + 2 * settings.request_timeout_s:
            named = ", ".join(map(str, sorted(waiting)))
            self._intake.fail(
                Unavailable(
                    f"group {self._group}: no committed offset of {named} for {waited_s:.0f} s,"
                    f" though a transaction that held them open would have timed out (if that goes on:"
                    f" docs/operations.md, transactions that never end)"
                )
            )

    def _begin_without_offset(self, partition: TopicPartition) -> bool:
        """librdkafka waited for a committed offset and found none, or one that retention has passed.

        That it found none is not to be believed: a coordinator that is just loading its groups may have said so.
        """
        if self._intake.positions.get(partition, 0) != _STORED:
            return False
        committed = self.committed().get(partition)
        bounds = self._intake.bounds(partition)
        if committed is not None and not bounds.start <= committed <= bounds.end:
            self._intake.positions[partition] = committed
            return False
        self._intake.restart(partition, bounds.start if committed is None else committed)
        return True


def _theirs(partitions: Iterable[TopicPartition]) -> list[Partition]:
    return [Partition(p.topic, p.partition) for p in partitions]
