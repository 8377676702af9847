"""A member of a consumer group over any store.

Each poll: (1) a sign of life, (2) give up what is meant for others (``on_revoke`` runs first, and may still commit),
(3) take what is free and meant for this member, (4) fetch. The state stands in ``group``.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.schemas.errors import Evicted, Fatal
from laminar.streams.embedded.cursor import Cursor, poll_until
from laminar.streams.embedded.store import GroupToken, Store
from laminar.streams.log import LogRecord, Membership, RebalanceCallback, TopicPartition

__all__ = ["EmbeddedConsumer"]

_BEATS_PER_SESSION = 4


class EmbeddedConsumer:
    """Implements ``laminar.streams.log.Consumer``."""

    def __init__(
        self,
        store: Store,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None,
        session_s: float,
        on_assign: RebalanceCallback | None,
        on_revoke: RebalanceCallback | None,
    ) -> None:
        self._store = store
        self._group = group
        self._topics = frozenset(topics)
        self._instance = instance
        self._session_s = session_s
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._cursor = Cursor(store, f"{group}/{instance or ''}")
        self._member: str | None = None
        self._revision = -1
        self._next_beat = 0.0
        self._closed = False
        for topic in self._topics:
            store.topic(topic)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``, in order per partition. Raises OffsetOutOfRange; Fenced for a replaced instance."""
        if self._closed:
            raise Fatal(f"group {self._group}: the consumer is closed")

        def attempt() -> list[LogRecord]:
            if not self._store.reachable():
                return []
            self._sync()
            return self._cursor.fetch(max_records)

        return poll_until(self._store, attempt, timeout_s, self._session_s / _BEATS_PER_SESSION)

    def assignment(self) -> frozenset[TopicPartition]:
        """As of the last poll."""
        return frozenset(self._cursor.positions)

    def position(self) -> dict[TopicPartition, int]:
        """Next offset that poll will return, per owned partition."""
        return dict(self._cursor.positions)

    def committed(self) -> dict[TopicPartition, int]:
        """The group's committed offsets of the owned partitions."""
        found: dict[TopicPartition, int] = {}
        for topic in sorted({p.topic for p in self._cursor.positions}):
            found.update(self._store.committed(self._group, topic))
        return {p: offset for p, offset in found.items() if p in self._cursor.positions}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next. Raises Evicted when the partition is not owned."""
        if partition not in self._cursor.positions:
            raise Evicted(f"group {self._group}: seek {partition}: not assigned to this member")
        self._cursor.put({partition: offset})

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        """Stop returning records of these partitions; membership goes on."""
        self._cursor.pause(partitions)

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        """Undo pause."""
        self._cursor.resume(partitions)

    def membership(self) -> Membership:
        """Proof of membership as of the last poll."""
        return Membership(self._group, GroupToken(self._member or "", self._revision))

    def close(self) -> None:
        """Leave the group at once."""
        if self._closed:
            return
        self._closed = True
        self._cursor.drop(self.assignment())
        if self._member is not None and self._store.reachable():
            with self._store.group(self._group) as group:
                group.leave(self._member)

    def _sync(self) -> None:
        """Steps 1 to 3."""
        if (
            self._member is not None
            and self._store.group_revision(self._group) == self._revision
            and self._store.monotonic() < self._next_beat
        ):
            return
        unwanted = self._beat()
        while unwanted:
            self._revoke(unwanted)
            with self._store.group(self._group) as group:
                group.release(self._member or "", unwanted)
            unwanted = self._beat()

    def _beat(self) -> frozenset[TopicPartition]:
        """Sign of life; join or rejoin; take what is free. Returns what has to be given up first."""
        now = self._store.monotonic()
        with self._store.group(self._group) as group:
            lost = self._member is None or not group.beat(self._member, now)
            if lost:
                if self._member is not None:
                    group.replaced(self._instance)
            else:
                group.expire(now)
                group.resize({name: spec.partitions for name, spec in self._store.topics().items()})
                unwanted = group.unwanted(self._member or "")
                taken = frozenset[TopicPartition]() if unwanted else group.take(self._member or "")
                self._revision = group.revision
        self._next_beat = now + self._session_s / _BEATS_PER_SESSION
        if lost:
            self._rejoin()
            return self._beat()
        self._assign(taken)
        return unwanted

    def _rejoin(self) -> None:
        self._revoke(frozenset(self._cursor.positions))
        self._member = self._store.member_name(self._instance)
        partitions = {topic: self._store.topic(topic).partitions for topic in self._topics}
        with self._store.group(self._group) as group:
            group.join(
                self._member,
                self._instance,
                self._topics,
                now=self._store.monotonic(),
                session_s=self._session_s,
                partitions=partitions,
            )

    def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        if not partitions:
            return
        try:
            if self._on_revoke is not None:
                self._on_revoke(partitions)
        finally:
            self._cursor.drop(partitions)

    def _assign(self, taken: frozenset[TopicPartition]) -> None:
        if not taken:
            return
        committed: dict[TopicPartition, int] = {}
        for topic in sorted({p.topic for p in taken}):
            committed.update(self._store.committed(self._group, topic))
        for partition in sorted(taken):
            offset = committed.get(partition)
            self._cursor.put({partition: self._store.bounds(partition).start if offset is None else offset})
        if self._on_assign is not None:
            self._on_assign(taken)
