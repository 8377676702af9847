"""Positions on some partitions, and a fair walk over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from laminar.streams.embedded.store import Store
from laminar.streams.log import LogRecord, TopicPartition

__all__ = ["Cursor", "poll_until"]


class Cursor:
    """Next offset per partition. Partitions are visited in turn, so that a full one cannot starve the others."""

    def __init__(self, store: Store, who: str) -> None:
        self._store = store
        self._who = who
        self._turn = 0
        self.positions: dict[TopicPartition, int] = {}

    def fetch(self, max_records: int, skip: Collection[TopicPartition] = ()) -> list[LogRecord]:
        """At most ``max_records`` from here on, without waiting. Raises OffsetOutOfRange, UnknownTopic."""
        order = [p for p in self.positions if p not in skip]
        if not order or max_records < 1:
            return []
        self._turn = (self._turn + 1) % len(order)
        found: list[LogRecord] = []
        for partition in order[self._turn :] + order[: self._turn]:
            if len(found) >= max_records:
                break
            got = self._store.fetch(partition, self.positions[partition], max_records - len(found), self._who)
            self.positions[partition] = got.next_offset
            found.extend(got.records)
        return found

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Exactly these."""
        self.positions = dict(positions)


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
