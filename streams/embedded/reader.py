"""A reader over any store: partitions and offsets of its own choice, no group."""

from __future__ import annotations

from collections.abc import Mapping

from laminar.schemas.errors import Fatal
from laminar.streams.embedded.cursor import Cursor, poll_until
from laminar.streams.embedded.store import Store
from laminar.streams.log import Bounds, LogRecord, TopicPartition

__all__ = ["EmbeddedReader"]

_WAKE_EVERY_S = 1.0


class EmbeddedReader:
    """Implements ``laminar.streams.log.Reader``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cursor = Cursor(store, "reader")

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, each from the given offset. Raises UnknownTopic."""
        for partition in positions:
            self._store.bounds(partition)
        self._cursor.drop(list(self._cursor.positions))
        self._cursor.put(positions)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most ``max_records``. Raises OffsetOutOfRange, UnknownTopic."""
        return poll_until(self._store, lambda: self._cursor.fetch(max_records), timeout_s, _WAKE_EVERY_S)

    def position(self) -> dict[TopicPartition, int]:
        """Next offset per assigned partition."""
        return dict(self._cursor.positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Poll from this offset next."""
        if partition not in self._cursor.positions:
            raise Fatal(f"seek {partition}: not assigned (assigned: {', '.join(map(str, self._cursor.positions))})")
        self._cursor.put({partition: offset})

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range as of now. Raises UnknownTopic."""
        return self._store.bounds(partition)

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """First offset whose timestamp is at least this; Bounds.end if there is none."""
        return self._store.offset_at(partition, timestamp_ms)

    def close(self) -> None:
        """Nothing is held."""
        self._cursor.drop(list(self._cursor.positions))
