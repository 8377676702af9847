"""The state of one consumer group: members, targets and owners. Pure: time comes with each call.

Rebalancing is cooperative. A change of members sets new targets; an owner that is no longer the target gives the
partition up in its next ``poll``; only then does the new target take it. A member that was silent for longer than
its session loses everything at once. ``revision`` grows with every change of members, targets or owners, and each
ownership remembers the revision at which it began: that is what a commit is fenced by.

>>> group = Group("g")
>>> group.join("m1", None, frozenset({"t"}), now=0.0, session_s=10.0, partitions={"t": 2})
>>> sorted(group.take("m1"))
[TopicPartition(topic='t', partition=0), TopicPartition(topic='t', partition=1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from laminar.schemas.errors import Evicted, Fenced
from laminar.streams.embedded.assignment import Assignor, assign
from laminar.streams.log import TopicPartition

__all__ = ["Group", "Member", "Ownership"]


@dataclass(slots=True)
class Member:
    """One consumer."""

    instance: str | None
    topics: frozenset[str]
    seen: float
    """Monotonic seconds of its last sign of life."""
    session_s: float


@dataclass(slots=True)
class Ownership:
    """Who owns a partition, and who should."""

    target: str | None = None
    owner: str | None = None
    since: int = 0
    """The group's revision when ``owner`` took it."""


@dataclass(slots=True)
class Group:
    """See the module's docstring."""

    name: str
    assignor: Assignor = "sticky"
    revision: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    owners: dict[TopicPartition, Ownership] = field(default_factory=dict)
    partitions: dict[str, int] = field(default_factory=dict)
    """Number of partitions of each subscribed topic, as of the last change."""

    def join(
        self,
        member: str,
        instance: str | None,
        topics: frozenset[str],
        *,
        now: float,
        session_s: float,
        partitions: Mapping[str, int],
    ) -> None:
        """Add a member. One of the same ``instance`` is replaced and the newcomer inherits its partitions at once."""
        old = next((m for m, known in self.members.items() if instance and known.instance == instance), None)
        self.revision += 1
        if old is not None:
            del self.members[old]
            for held in self.owners.values():
                if held.target == old:
                    held.target = member
                if held.owner == old:
                    held.owner = None
        self.members[member] = Member(instance, topics, now, session_s)
        self.partitions.update(partitions)
        self.expire(now)
        self._retarget()

    def leave(self, member: str) -> None:
        """Remove a member; its partitions are free at once."""
        if member in self.members:
            self._drop([member])

    def expire(self, now: float) -> list[str]:
        """Remove the members whose session is over; a ``seen`` in the future is from before a reboot."""
        dead = [m for m, known in self.members.items() if not known.seen <= now <= known.seen + known.session_s]
        if dead:
            self._drop(dead)
        return dead

    def beat(self, member: str, now: float) -> bool:
        """A sign of life; False when the member is not in the group any more."""
        known = self.members.get(member)
        if known is None:
            return False
        known.seen = now
        return True

    def replaced(self, instance: str | None) -> None:
        """Raise Fenced if another member runs under this instance's name."""
        if instance and any(known.instance == instance for known in self.members.values()):
            raise Fenced(f"group {self.name}: another process runs as instance {instance!r}; this one must stop")

    def resize(self, partitions: Mapping[str, int]) -> None:
        """Topics were created or deleted: set new targets if that concerns this group."""
        now = {topic: partitions[topic] for topic in self._topics() if topic in partitions}
        if now != self.partitions:
            self.partitions = now
            self.revision += 1
            self._retarget()

    def owned(self, member: str) -> frozenset[TopicPartition]:
        """What the member owns."""
        return frozenset(p for p, held in self.owners.items() if held.owner == member)

    def unwanted(self, member: str) -> frozenset[TopicPartition]:
        """What the member owns and has to give up."""
        return frozenset(p for p, held in self.owners.items() if held.owner == member and held.target != member)

    def release(self, member: str, partitions: Iterable[TopicPartition]) -> None:
        """The member gives these up."""
        given = [p for p in partitions if p in self.owners and self.owners[p].owner == member]
        for partition in given:
            self.owners[partition].owner = None
        if given:
            self.revision += 1

    def take(self, member: str) -> frozenset[TopicPartition]:
        """Give the member what is meant for it and free; return that."""
        free = frozenset(p for p, held in self.owners.items() if held.target == member and held.owner is None)
        if free:
            self.revision += 1
        for partition in free:
            self.owners[partition].owner = member
            self.owners[partition].since = self.revision
        return free

    def check(self, member: str | None, revision: int, partitions: Iterable[TopicPartition]) -> None:
        """Raise Evicted unless the member has owned all of these without a break since ``revision``.

        ``member`` None: a consumer that assigned itself; allowed only while the group has no members.
        """
        if member is None:
            if self.members:
                raise Evicted(f"group {self.name}: has members, offsets are committed by them only")
            return
        if member not in self.members:
            raise Evicted(
                f"group {self.name}: {member} is no longer a member; nothing was committed, rewind and rejoin"
            )
        for partition in partitions:
            held = self.owners.get(partition)
            if held is None or held.owner != member or held.since > revision:
                owner = held.owner if held else None
                raise Evicted(
                    f"group {self.name}: {member} does not own {partition} since revision {revision} "
                    f"(owner: {owner}); nothing was committed, rewind"
                )

    def _topics(self) -> set[str]:
        return {topic for known in self.members.values() for topic in known.topics}

    def _drop(self, members: list[str]) -> None:
        for member in members:
            del self.members[member]
        for held in self.owners.values():
            if held.owner in members:
                held.owner = None
            if held.target in members:
                held.target = None
        self.revision += 1
        self._retarget()

    def _retarget(self) -> None:
        topics = self._topics()
        partitions = {topic: count for topic, count in self.partitions.items() if topic in topics}
        current = {p: held.target or held.owner for p, held in self.owners.items()}
        target = assign(
            self.assignor,
            {m: known.topics for m, known in self.members.items()},
            partitions,
            {p: member for p, member in current.items() if member is not None},
        )
        for partition in sorted(target.keys() | self.owners.keys()):
            held = self.owners.setdefault(partition, Ownership())
            held.target = target.get(partition)
            if held.target is None and held.owner is None:
                del self.owners[partition]
