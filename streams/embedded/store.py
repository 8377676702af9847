"""The seam between the embedded log and where its bytes live: a few atomic operations.

A store may be used from several threads. Times: ``now`` is Unix epoch seconds (record timestamps), ``monotonic``
any clock that all users of the store share (sessions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from laminar.streams.deadline import Deadline
from laminar.streams.embedded.group import Group
from laminar.streams.log import Bounds, LogRecord, Membership, OutRecord, TopicPartition, TopicSpec

__all__ = ["Commit", "Fetched", "GroupToken", "Store"]


class GroupToken(NamedTuple):
    """What an embedded consumer's Membership carries."""

    member: str
    revision: int


class Fetched(NamedTuple):
    """Records of one partition, and the offset to go on from (it passes gaps)."""

    records: list[LogRecord]
    next_offset: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction, ready to be made visible in one go."""

    transactional_id: str
    epoch: int
    records: Mapping[TopicPartition, Sequence[OutRecord]]
    """By partition, in order; a record without a time gets the time of the commit."""
    offsets: Sequence[tuple[Membership, Mapping[TopicPartition, int]]]


class Store(Protocol):
    """See the module's docstring."""

    blocking: bool
    """False: ``wait`` returns at once, because time is under somebody else's control."""

    volatile: bool
    """True: what can be read may change while ``version`` does not, so a poll always looks."""

    def now(self) -> float:
        """Unix epoch seconds."""

    def monotonic(self) -> float:
        """Seconds, for sessions."""

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """As Log.create_topics."""

    def topics(self) -> Mapping[str, TopicSpec]:
        """All topics; may be a cached view of a moment ago (``commit`` checks again)."""

    def topic(self, name: str) -> TopicSpec:
        """One topic, with a fresh look where the cached view does not have it. Raises UnknownTopic."""

    def delete_topic(self, name: str) -> None:
        """As Log.delete_topic. The groups' offsets on it go too."""

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Raises UnknownTopic."""

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """As Reader.offset_at."""

    def fetch(self, partition: TopicPartition, offset: int, max_records: int, who: str) -> Fetched:
        """Committed records from ``offset`` on, at least those of the last ``version()``.

        Raises OffsetOutOfRange, UnknownTopic.
        """

    def open_producer(self, transactional_id: str) -> int:
        """Fence all older producers of the id; return the new epoch."""

    def commit(self, commit: Commit, deadline: Deadline) -> None:
        """All or nothing. Raises Fenced, Evicted, UnknownTopic, Unavailable, DeadlineExceeded: nothing happened."""

    def reachable(self) -> bool:
        """False: nothing can be asked now; polls return nothing, and the session runs on."""

    def member_name(self, instance: str | None) -> str:
        """A new member's name, never given before."""

    def group_revision(self, group: str) -> int:
        """Cheap: has anything changed in the group? -1 when it does not exist."""

    def group(self, group: str) -> AbstractContextManager[Group]:
        """The group's state, alone: what is changed inside the block is stored when it ends."""

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Committed offsets."""

    def unread(self, partition: TopicPartition, offset: int) -> int:
        """Number of readable records from ``offset`` on. Raises UnknownTopic."""

    def version(self) -> object:
        """Changes with everything that could wake a poller."""

    def wait(self, version: object, timeout_s: float) -> None:
        """Return when ``version()`` differs or the time is over."""

    def close(self) -> None:
        """Release everything."""
