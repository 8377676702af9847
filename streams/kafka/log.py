"""The log port on Apache Kafka (brokers from 2.5 with the classic group protocol, from 4.0 with the default one).

>>> with closing(KafkaLog("127.0.0.1:9092")) as log:        # doctest: +SKIP
...     log.create_topics([TopicSpec(name="prompts", partitions=8)])
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import ClientSettings, Connection, GroupProtocol
from laminar.streams.kafka.consumer import KafkaConsumer
from laminar.streams.kafka.lag import Lag
from laminar.streams.kafka.offsets import Offsets
from laminar.streams.kafka.producer import KafkaProducer
from laminar.streams.kafka.reader import KafkaReader
from laminar.streams.log import RebalanceCallback, TopicInfo, TopicPartition, TopicSpec

__all__ = ["KafkaLog"]


class KafkaLog:
    """Implements ``laminar.streams.log.Log``. Connects with the first call that needs a broker."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client: ClientSettings | None = None,
        group_protocol: GroupProtocol = "consumer",
        request_timeout_s: float = 15.0,
        transaction_timeout_s: float = 30.0,
        session_timeout_s: float = 6.0,
        poll_interval_s: float = 300.0,
        outage_s: float = 120.0,
        compression: str = "zstd",
        replication_factor: int = -1,
    ) -> None:
        """
        :param bootstrap: ``host:port`` of some brokers, separated by commas
        :param client: librdkafka's own settings, for example ``sasl.username``; never printed
        :param group_protocol: ``consumer`` (KIP-848) or ``classic``; what they mean for members: see KafkaConsumer
        :param request_timeout_s: how long any one call may wait for a broker
        :param transaction_timeout_s: after this the broker aborts an open transaction whose owner is gone, and
            fences an owner that is merely slow
        :param session_timeout_s: silence after which a member counts as dead; classic protocol only, with the other
            it is the broker's setting
        :param poll_interval_s: a member that does not poll for so long is put out of its group
        :param outage_s: poll raises Unavailable when no broker has answered for so long
        :param replication_factor: of created topics; -1 = the broker's default
        """
        self._connection = Connection(
            bootstrap,
            client=client,
            group_protocol=group_protocol,
            request_timeout_s=request_timeout_s,
            transaction_timeout_s=transaction_timeout_s,
            session_timeout_s=session_timeout_s,
            poll_interval_s=poll_interval_s,
            outage_s=outage_s,
            compression=compression,
        )
        self._admin = Admin(self._connection, replication_factor)
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
        made = KafkaProducer(self._connection, self._admin, self._offsets, transactional_id)
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
        self._lag.close()
        self._offsets.close()
        self._admin.close()
