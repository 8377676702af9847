"""The log port on Apache Kafka (brokers from 2.5 with the classic group protocol, from 4.0 with the default one).

>>> with closing(KafkaLog("127.0.0.1:9092")) as log:        # doctest: +SKIP
...     log.create_topics([TopicSpec(name="prompts", partitions=8)])
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.consumer import KafkaConsumer
from laminar.streams.kafka.lag import Lag
from laminar.streams.kafka.offsets import Offsets
from laminar.streams.kafka.producer import KafkaProducer
from laminar.streams.kafka.reader import KafkaReader
from laminar.streams.kafka.settings import KafkaSettings
from laminar.streams.log import RebalanceCallback, TopicInfo, TopicPartition, TopicSpec

__all__ = ["KafkaLog"]


class KafkaLog:
    """Implements ``laminar.streams.log.Log``. Connects with the first call that needs a broker."""

    def __init__(self, bootstrap: str | KafkaSettings, **settings: Any) -> None:
        """
        :param bootstrap: ``host:port`` of some brokers, separated by commas; or all settings at once
        :param settings: see KafkaSettings, which knows their names, defaults and meaning
        """
        if isinstance(bootstrap, KafkaSettings):
            given = replace(bootstrap, **settings)
        else:
            given = KafkaSettings(bootstrap=bootstrap, **settings)
        self._connection = Connection(given)
        self._admin = Admin(self._connection, given.replication_factor)
        self._offsets = Offsets(self._connection)
        self._lag = Lag(self._connection, self._admin, self._offsets)
        self._open: weakref.WeakSet[KafkaConsumer | KafkaReader | KafkaProducer] = weakref.WeakSet()

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing. Raises TopicMismatch when one exists with another number of partitions."""
        self._admin.create(specs)

    def topics(self) -> dict[str, TopicInfo]:
        """All topics but Kafka's own."""
        return self._admin.topics()

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records. Raises UnknownTopic."""
        self._admin.delete(name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> KafkaConsumer:
        """A new member of a group. Raises UnknownTopic."""
        made = KafkaConsumer(
            self._connection,
            self._admin,
            group,
            topics,
            instance=instance,
            on_assign=on_assign,
            on_revoke=on_revoke,
        )
        self._open.add(made)
        return made

    def reader(self) -> KafkaReader:
        """A new reader."""
        made = KafkaReader(self._connection, self._admin)
        self._open.add(made)
        return made

    def producer(self, transactional_id: str) -> KafkaProducer:
        """A transactional producer; fences every older one of the same id."""
        made = KafkaProducer(self._connection, self._admin, transactional_id)
        self._open.add(made)
        return made

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """A group's committed offsets on a topic. Raises UnknownTopic."""
        partitions = self._admin.facts(topic).partitions
        return self._offsets.committed(group, [TopicPartition(topic, p) for p in range(partitions)])

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Records that the group has still to commit, per partition. Raises UnknownTopic."""
        return self._lag.of(group, topic)

    def close(self) -> None:
        """Close everything that came from here."""
        for opened in list(self._open):
            opened.close()
        self._connection.initialising.clear()  # one that goes on trying would fence its successor
        self._lag.close()
        self._offsets.close()
        self._admin.close()
