"""Positions on some partitions, and a fair walk over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from laminar.streams.embedded.store import Store
from laminar.streams.log import LogRecord, TopicPartition

__all__ = ["Cursor", "poll_until"]

_POLL_BYTES = 32 * 1024 * 1024
"""A poll visits no further partition once it has this much."""


class Cursor:
    """Next offset per partition. Partitions are visited in turn, so that a full one cannot starve the others."""

    def __init__(self, store: Store, who: str) -> None:
        self._store = store
        self._who = who
        self._turn = 0
        self._positions: dict[TopicPartition, int] = {}
        self._paused: frozenset[TopicPartition] = frozenset()
        self._empty: object = None
        """The store's version when nothing was found; nothing will be, as long as it stands."""

    @property
    def positions(self) -> Mapping[TopicPartition, int]:
        """Next offset of each partition."""
        return self._positions

    def fetch(self, max_records: int) -> list[LogRecord]:
        """At most ``max_records`` from here on, without waiting. Raises OffsetOutOfRange, UnknownTopic."""
        version = self._store.version()
        if version == self._empty and not self._store.volatile:
            return []
        order = [p for p in self._positions if p not in self._paused]
        if not order or max_records < 1:
            return []
        turn = self._turn % len(order)
        found: list[LogRecord] = []
        size = 0
        for partition in order[turn:] + order[:turn]:
            if len(found) >= max_records or size >= _POLL_BYTES:
                break
            got = self._store.fetch(partition, self._positions[partition], max_records - len(found), self._who)
            self._positions[partition] = got.next_offset
            found += got.records
            size += sum(len(r.value) for r in got.records if r.value)
        if found:
            self._turn = turn + 1
        self._empty = None if found else version
        return found

    def put(self, positions: Mapping[TopicPartition, int]) -> None:
        """Go on from these offsets."""
        self._positions.update(positions)
        self._empty = None

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget these."""
        for partition in partitions:
            self._positions.pop(partition, None)
        self._paused -= frozenset(partitions)

    def pause(self, partitions: frozenset[TopicPartition]) -> None:
        """Return nothing of these."""
        self._paused |= partitions & self._positions.keys()

    def resume(self, partitions: frozenset[TopicPartition]) -> None:
        """Undo pause."""
        self._paused -= partitions
        self._empty = None


def poll_until(
    store: Store,
    attempt: Callable[[], list[LogRecord]],
    timeout_s: float,
    wake_every_s: float,
) -> list[LogRecord]:
    """Call ``attempt`` whenever the store changed, at least every ``wake_every_s``, until it returns something."""
    end = store.monotonic() + timeout_s
    while True:
        version = store.version()
        found = attempt()
        left = end - store.monotonic()
        if found or left <= 0 or not store.blocking:
            return found
        store.wait(version, min(left, wake_every_s))
