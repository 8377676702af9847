"""The log port: the one interface through which operators see a log.

Three adapters implement it (``kafka``, ``sqlite``, ``memory``) and one contract suite holds them to the same
behaviour. The semantics are Kafka's:

* Records of one partition are read in the order they were committed; offsets grow and may have gaps.
* A transaction's records (on any topics) and its offsets become visible together or not at all. Readers and
  consumers only ever see committed records, and never one beyond an open transaction's first record.
* ``Log.producer(id)`` fences every older producer of the same transactional id: their next call raises Fenced.
* A consumer belongs to a group; each partition has one owner in the group. A transaction that carries offsets
  of a member that no longer owns the partition raises Evicted and commits nothing.
* A consumer starts at its group's committed offset, or at the beginning of the partition without one.

Nothing blocks beyond the ``timeout_s`` it is given, or the adapter's own configured ``request_timeout_s``.

>>> with log.producer("reward-0").transaction() as tx:              # doctest: +SKIP
...     tx.send(OutRecord(topic="trajectories.scored", key=b"g", value=b"..."))
...     tx.commit_offsets(consumer.membership(), {TopicPartition("trajectories.completed", 0): 42})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

__all__ = [
    "Bounds",
    "Cleanup",
    "Consumer",
    "Log",
    "LogRecord",
    "Membership",
    "OutRecord",
    "Producer",
    "Reader",
    "RebalanceCallback",
    "TopicInfo",
    "TopicPartition",
    "TopicSpec",
    "Transaction",
]

Cleanup = Literal["delete", "compact", "compact,delete"]


class TopicPartition(NamedTuple):
    """One partition of a topic; prints as ``topic[3]``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


class Bounds(NamedTuple):
    """First readable offset, and the offset after the last readable one (Kafka: the last stable offset)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """What a topic should look like."""

    name: str
    partitions: int
    cleanup: Cleanup = "delete"
    retention_ms: int = -1
    """-1 = for ever."""
    retention_bytes: int = -1
    """Per partition; -1 = unlimited."""
    max_record_bytes: int = 64 * 1024 * 1024
    """Largest encoded record (key + value + headers); a larger one is refused before it is sent."""
    compaction_lag_ms: int = 0
    """Records younger than this are never compacted away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """What a topic does look like."""

    name: str
    partitions: int
    cleanup: Cleanup


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record as read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    """None deletes the key on a compacted topic."""
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def where(self) -> str:
        """``topic[partition]@offset``, for messages."""
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def source(self) -> TopicPartition:
        """The partition it stands on."""
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutRecord:
    """A record to write."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None
    """None: murmur2 hash of the key, as Kafka's Java client; a null key goes to partition 0 .. n-1 in turn."""
    timestamp_ms: int | None = None
    """None: now."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Proof of membership in a consumer group, taken fresh for each transaction (KIP-447)."""

    group: str
    token: Any = None
    """The adapter's own; None = offsets of a group without members (a consumer that assigns itself)."""


RebalanceCallback = Callable[[frozenset[TopicPartition]], None]


class Transaction(Protocol):
    """An open transaction: see Producer.transaction."""

    def send(self, record: OutRecord) -> None:
        """Add a record. Raises RecordTooLarge, UnknownTopic, Retryable (back-pressure beyond the timeout)."""

    def commit_offsets(self, membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit, together with the records, the next offset to read of each partition."""


class Producer(Protocol):
    """A transactional producer: one per process, with a stable id."""

    def transaction(
        self, timeout_s: float | None = None, *, visible: bool = True
    ) -> AbstractContextManager[Transaction]:
        """A transaction: commits when the block ends, aborts when it raises.

        When this returns normally the records are durable and, if ``visible``, readers find them (otherwise a moment
        later: waiting for it costs a log of its own requests, and CPU time here). An unknown outcome is resolved inside
        (commit is retried, never redone). Raises Aborted or Evicted (nothing visible: rewind, redo), Fenced
        (stop), Unavailable or DeadlineExceeded (the outcome is resolved before the next transaction begins).
        """

    def close(self) -> None:
        """Abort what is open and release the id."""


class Consumer(Protocol):
    """A member of a consumer group. Not thread-safe."""

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``, in order per partition; empty when nothing came within ``timeout_s``.

        Rebalance callbacks run inside. Must be called often: it is the member's sign of life.
        """

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions this member owns."""

    def position(self) -> dict[TopicPartition, int]:
        """Next offset that poll will return, per owned partition."""

    def committed(self) -> dict[TopicPartition, int]:
        """The group's committed offsets of the owned partitions (partitions without one are absent)."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next. Drops what was fetched ahead."""

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        """Stop returning records of these partitions; membership goes on."""

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        """Undo pause."""

    def membership(self) -> Membership:
        """Proof of membership as of now."""

    def close(self) -> None:
        """Leave the group at once. Uncommitted work is the next owner's."""


class Reader(Protocol):
    """Reads partitions that it chose itself, outside any group, from any offset. Not thread-safe."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, each from the given offset."""

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``; empty when nothing came in time. Raises OffsetOutOfRange, UnknownTopic."""

    def position(self) -> dict[TopicPartition, int]:
        """Next offset per assigned partition. Reaches Bounds.end even where the tail is control markers."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next."""

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range as of now. Raises UnknownTopic."""

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """First offset whose timestamp is at least this (in a gap: that of its transaction's end); or Bounds.end."""

    def close(self) -> None:
        """Release the connection."""


class Log(Protocol):
    """A log: topics of partitions of records."""

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing. Raises TopicMismatch when one exists with another number of partitions."""

    def topics(self) -> dict[str, TopicInfo]:
        """All topics of this log (without the log's internal ones)."""

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records. Raises UnknownTopic."""

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> Consumer:
        """A new member of a group. ``instance`` names it for static membership and for errors."""

    def reader(self) -> Reader:
        """A new reader."""

    def producer(self, transactional_id: str) -> Producer:
        """A transactional producer; fences every older one of the same id."""

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """A group's committed offsets on a topic, seen from outside the group."""

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Records that the group has still to commit, per partition; reaches 0 (control markers do not count)."""

    def close(self) -> None:
        """Release everything."""
