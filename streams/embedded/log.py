"""The log port over any store."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from laminar.schemas.errors import Retryable, UnknownTopic
from laminar.streams.embedded.consumer import EmbeddedConsumer
from laminar.streams.embedded.producer import EmbeddedProducer
from laminar.streams.embedded.reader import EmbeddedReader
from laminar.streams.embedded.store import Store
from laminar.streams.log import RebalanceCallback, TopicInfo, TopicPartition, TopicSpec

__all__ = ["EmbeddedLog"]

_LOG = logging.getLogger(__name__)


class EmbeddedLog:
    """Implements ``laminar.streams.log.Log``; adapters subclass it with their store."""

    def __init__(
        self,
        store: Store,
        *,
        session_timeout_s: float,
        request_timeout_s: float,
        max_transaction_bytes: int,
    ) -> None:
        self._store = store
        self._session_timeout_s = session_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_transaction_bytes = max_transaction_bytes
        self._consumers: weakref.WeakSet[EmbeddedConsumer] = weakref.WeakSet()
        self._closed = False

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing. Raises TopicMismatch when one exists with another number of partitions."""
        self._store.create_topics(specs)

    def topics(self) -> dict[str, TopicInfo]:
        """All topics of this log."""
        return {
            name: TopicInfo(name=name, partitions=spec.partitions, cleanup=spec.cleanup)
            for name, spec in sorted(self._store.topics().items())
        }

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records. Raises UnknownTopic."""
        self._store.delete_topic(name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> EmbeddedConsumer:
        """A new member of a group; it joins in its first poll. Raises UnknownTopic."""
        consumer = EmbeddedConsumer(
            self._store,
            group,
            topics,
            instance=instance,
            session_s=self._session_timeout_s,
            on_assign=on_assign,
            on_revoke=on_revoke,
        )
        self._consumers.add(consumer)
        return consumer

    def reader(self) -> EmbeddedReader:
        """A new reader."""
        return EmbeddedReader(self._store)

    def producer(self, transactional_id: str) -> EmbeddedProducer:
        """A transactional producer; fences every older one of the same id."""
        return EmbeddedProducer(
            self._store,
            transactional_id,
            request_timeout_s=self._request_timeout_s,
            max_bytes=self._max_transaction_bytes,
        )

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """A group's committed offsets on a topic. Raises UnknownTopic."""
        self._store.topic(topic)
        return self._store.committed(group, topic)

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Records that the group has still to commit, per partition. Raises UnknownTopic."""
        spec = self._store.topics().get(topic)
        if spec is None:
            raise UnknownTopic(f"{topic}: no such topic (valid: {', '.join(sorted(self._store.topics()))})")
        committed = self._store.committed(group, topic)
        every = [TopicPartition(topic, p) for p in range(spec.partitions)]
        return {p: self._store.unread(p, committed.get(p, 0)) for p in every}

    def close(self) -> None:
        """Leave all groups and release everything."""
        if self._closed:
            return
        self._closed = True
        try:
            for consumer in list(self._consumers):
                consumer.close()
        except Retryable as error:
            _LOG.warning("left a group without a word, its session will end: %s", error)
        finally:
            self._store.close()
