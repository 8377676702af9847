"""A handle's view of topics, partition ends and group revisions, loaded again only when somebody committed.

Pollers ask it all the time; while nothing happens, an answer costs one ``PRAGMA data_version``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

from laminar.schemas.errors import UnknownTopic
from laminar.streams.log import Bounds, TopicPartition, TopicSpec
from laminar.streams.sqlite.database import Database

__all__ = ["Catalog", "PartitionRow", "dump_spec"]


class PartitionRow(NamedTuple):
    """A partition as it stands in the database."""

    number: int
    """Its id in the database."""
    bounds: Bounds


def dump_spec(spec: TopicSpec) -> str:
    """The text that stands in the database."""
    return json.dumps(asdict(spec))


class Catalog:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: tuple[int, int] | None = None
        self._revision = ""
        self._bounds: dict[int, tuple[int, int]] = {}
        self.specs: dict[str, TopicSpec] = {}
        self.numbers: dict[TopicPartition, int] = {}
        self.names: dict[int, TopicPartition] = {}
        self.groups: dict[str, int] = {}

    def refresh(self) -> tuple[int, int]:
        """Look again if anything was committed; returns the version of the view."""
        with self._database.lock:
            version = self._database.version()
            if version != self._seen:
                self._load()
                self._seen = version
            return version

    def end(self, partition: TopicPartition) -> int:
        """The offset after the last record. Raises UnknownTopic."""
        number = self.numbers.get(partition)
        return self.row(partition).bounds.end if number is None else self._bounds[number][1]

    def expect(self, ends: Mapping[TopicPartition, int]) -> None:
        """These ends are being committed, and nothing else that stands here: saves loading it all again after.

        Called inside the write transaction, after ``refresh``; if it does not commit, ``forget`` has to follow.
        """
        for partition, end in ends.items():
            number = self.numbers[partition]
            self._bounds[number] = self._bounds[number][0], end
        if self._seen is not None:
            self._seen = self._seen[0], self._seen[1] + 1

    def forget(self) -> None:
        """Load again at the next refresh."""
        self._seen = None

    def row(self, partition: TopicPartition) -> PartitionRow:
        """Raises UnknownTopic."""
        number = self.numbers.get(partition)
        if number is None:
            raise UnknownTopic(f"{partition}: no such partition (topics: {', '.join(sorted(self.specs))})")
        return PartitionRow(number, Bounds(*self._bounds[number]))

    def topic(self, name: str) -> TopicSpec:
        """Raises UnknownTopic."""
        found = self.specs.get(name)
        if found is None:
            raise UnknownTopic(f"{name}: no such topic (valid: {', '.join(sorted(self.specs))})")
        return found

    def _load(self) -> None:
        rows = self._database.rows
        revision = rows("SELECT value FROM meta WHERE key = 'catalog'")[0][0]
        if revision != self._revision:
            self.specs = {name: TopicSpec(**json.loads(text)) for name, text in rows("SELECT name, spec FROM topics")}
            self.names = {n: TopicPartition(*p) for n, *p in rows("SELECT id, topic, partition FROM partitions")}
            self.numbers = {partition: number for number, partition in self.names.items()}
            self._revision = revision
        self._bounds = {n: (start, end) for n, start, end in rows("SELECT id, start, end FROM partitions")}
        self.groups = dict(rows("SELECT name, revision FROM groups"))
