"""A handle's view of topics, partition ends and group revisions, loaded again only when somebody committed.

Pollers ask it all the time; while nothing happens, an answer costs one ``PRAGMA data_version``.
"""

from __future__ import annotations

import json
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
        self.specs: dict[str, TopicSpec] = {}
        self.partitions: dict[TopicPartition, PartitionRow] = {}
        self.names: dict[int, TopicPartition] = {}
        self.groups: dict[str, int] = {}

    def refresh(self) -> tuple[int, int]:
        """Look again if anything was committed; returns the version of the view."""
        with self._database.lock:
            version = self._database.version()
            if version != self._seen:
                self.load()
                self._seen = version
            return version

    def load(self) -> None:
        """Look again."""
        rows = self._database.rows
        revision = rows("SELECT value FROM meta WHERE key = 'catalog'")[0][0]
        if revision != self._revision:
            self.specs = {name: TopicSpec(**json.loads(text)) for name, text in rows("SELECT name, spec FROM topics")}
            self._revision = revision
        self.partitions = {
            TopicPartition(topic, partition): PartitionRow(number, Bounds(start, end))
            for number, topic, partition, start, end in rows("SELECT id, topic, partition, start, end FROM partitions")
        }
        self.names = {row.number: partition for partition, row in self.partitions.items()}
        self.groups = dict(rows("SELECT name, revision FROM groups"))

    def row(self, partition: TopicPartition) -> PartitionRow:
        """Raises UnknownTopic."""
        found = self.partitions.get(partition)
        if found is None:
            raise UnknownTopic(f"{partition}: no such partition (topics: {', '.join(sorted(self.specs))})")
        return found

    def topic(self, name: str) -> TopicSpec:
        """Raises UnknownTopic."""
        found = self.specs.get(name)
        if found is None:
            raise UnknownTopic(f"{name}: no such topic (valid: {', '.join(sorted(self.specs))})")
        return found
