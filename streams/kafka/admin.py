"""Topics: creation, listing, deletion, and what a producer has to know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from laminar.schemas.errors import ConfigError, TopicMismatch, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.errors import error_of
from laminar.streams.kafka.topic_watch import TopicWatch
from laminar.streams.log import Cleanup, TopicInfo, TopicPartition, TopicSpec

__all__ = ["Admin", "Operation", "TopicFacts"]

Operation = Literal["READ", "WRITE"]

_OVERHEAD = 1024
"""What a broker's limit, which is on batches, must leave for a batch's and a record's own framing."""
_THERE = KafkaError.TOPIC_ALREADY_EXISTS
_GONE = KafkaError.UNKNOWN_TOPIC_OR_PART
_HOUR_MS = 3_600_000
_WEEK_MS = 7 * 24 * _HOUR_MS
_GIB = 1024**3
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What a client has to know of a topic."""

    name: str
    partitions: int
    """As it has now."""
    spread: int
    """Partitions that keys are spread over: those that the run began with, also where some have been added."""
    max_record_bytes: int
    permitted: frozenset[str] | None
    """What its access control lists let us do, such as READ; None: the broker does not say."""


class Admin:
    """One per KafkaLog; connects with the first call."""

    def __init__(self, connection: Connection, replication_factor: int) -> None:
        self._connection = connection
        self._replication_factor = replication_factor
        self._client: AdminClient | None = None
        self._facts: dict[str, TopicFacts] = {}
        self.watch = TopicWatch(connection.bootstrap, self._connected, self.forget)

    def create(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing, and wait until it is there."""
        known = self._partitions()
        missing = [spec for spec in specs if spec.name not in known]
        if missing:
            new = [
                NewTopic(
                    spec.name,
                    num_partitions=spec.partitions,
                    replication_factor=self._replication_factor,
                    config=_config(spec),
                )
                for spec in missing
            ]
            for name, future in self._start(lambda c, t: c.create_topics(new, request_timeout=t)).items():
                needs = f"CREATE on topic {name} (or somebody else has to create it)"
                self._result(future, f"create topic {name}", ignore=_THERE, needs=needs)
                self._facts.pop(name, None)
        deadline = Deadline.after(
            self._connection.request_timeout_s, f"new topics appear on {self._connection.bootstrap}"
        )
        while not all(spec.name in known for spec in specs):
            known = self._partitions()
            deadline.check(", ".join(spec.name for spec in specs if spec.name not in known))
        for spec in specs:
            more_is_well = spec.name in self._connection.settings.partitions
            if known[spec.name] < spec.partitions or (known[spec.name] > spec.partitions and not more_is_well):
                raise TopicMismatch(
                    f"{spec.name}: has {known[spec.name]} partitions on {self._connection.bootstrap}, "
                    f"{spec.partitions} are configured"
                )

    def topics(self) -> dict[str, TopicInfo]:
        """All topics but Kafka's own."""
        partitions = self._partitions()
        configs = self._configs(partitions, all_of_them=True)
        return {
            name: TopicInfo(name=name, partitions=partitions[name], cleanup=_cleanup(config.get("cleanup.policy", "")))
            for name, config in configs.items()
        }

    def delete(self, name: str) -> None:
        """Delete, and wait until it is gone."""
        (future,) = self._start(lambda c, t: c.delete_topics([name], request_timeout=t)).values()
        self._result(future, f"delete topic {name}", needs=f"DELETE on topic {name}")
        self._facts.pop(name, None)
        self.watch.drop(name)
        deadline = Deadline.after(self._connection.request_timeout_s, f"topic {name} is gone")
        while name in self._partitions():
            deadline.check()
            time.sleep(0.02)

    def facts(self, name: str, *, needs: Operation | None = None) -> TopicFacts:
        """Of one topic; remembered. Raises UnknownTopic, TopicMismatch, ConfigError (``needs`` is not permitted)."""
        known = self._facts.get(name)
        if known is None:
            known = self._facts[name] = self._ask_facts(name)
        if needs is not None and known.permitted is not None and needs not in known.permitted:
            self._facts.pop(name, None)
            where = f"topic {name} on {self._connection.bootstrap}"
            raise ConfigError(f"{where}: not permitted: the user of log.client needs {needs} on topic {name}")
        return known

    def _ask_facts(self, name: str) -> TopicFacts:
        futures = self._start(
            lambda c, t: c.describe_topics(
                TopicCollection([name]), include_authorized_operations=True, request_timeout=t
            )
        )
        described = self._result(futures[name], f"topic {name}", needs=f"DESCRIBE on topic {name}, if there is one")
        self.watch.note(name, described)
        config = self._configs([name]).get(name)
        if config is None:
            raise UnknownTopic(f"{name}: no such topic on {self._connection.bootstrap}")
        limit = int(config["max.message.bytes"]) - _OVERHEAD
        partitions = len(described.partitions)
        operations = described.authorized_operations
        return TopicFacts(
            name,
            partitions,
            min(partitions, self._connection.settings.partitions.get(name, partitions)),
            min(limit, self._connection.max_record_bytes),
            frozenset(operation.name for operation in operations) if operations else None,
        )

    def readable_ends(self, partitions: Iterable[TopicPartition], timeout_s: float) -> dict[TopicPartition, int]:
        """The last stable offsets of partitions whose leaders answer in time: one request to each leader."""
        asked = {Partition(p.topic, p.partition): OffsetSpec.latest() for p in partitions}  # type: ignore[no-untyped-call]
        futures = self._connected().list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=timeout_s
        )
        found = {}
        for partition, future in futures.items():
            with suppress(KafkaException, TimeoutError):
                end = future.result(timeout_s + 1.0).offset
                if end >= 0:  # -1001 comes in place of an error
                    found[TopicPartition(partition.topic, partition.partition)] = end
        return found

    def forget(self, name: str) -> None:
        """What is remembered of a topic turned out to be wrong."""
        self._facts.pop(name, None)

    def close(self) -> None:
        """Disconnect."""
        self._client = None

    def _partitions(self) -> dict[str, int]:
        client = self._connected()
        try:
            found = client.list_topics(timeout=self._connection.request_timeout_s).topics
        except KafkaException as e:
            raise self._connection.failed(e, "list topics", client=client) from e
        self._connection.answered()
        return {
            name: len(topic.partitions)
            for name, topic in found.items()
            if not name.startswith("__") and topic.error is None
        }

    def _configs(self, names: Iterable[str], *, all_of_them: bool = False) -> dict[str, dict[str, str]]:
        """Configs of the topics that exist; {} of ``all_of_them`` that others keep to themselves."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        found = {}
        for resource, future in self._start(lambda c, t: c.describe_configs(resources, request_timeout=t)).items():
            what, needs = f"config of topic {resource.name}", f"DESCRIBE_CONFIGS on topic {resource.name}"
            try:
                entries = self._result(future, what, ignore=_GONE, needs=needs)
            except ConfigError:
                if not all_of_them:
                    raise
                entries = {}
            if entries is not None:
                found[resource.name] = {key: entry.value for key, entry in entries.items()}
        return found

    def _connected(self) -> AdminClient:
        if self._client is None:
            self._client = self._connection.admin()
        return self._client

    def _start(self, call: Callable[[AdminClient, float], Mapping[Any, Future[Any]]]) -> Mapping[Any, Future[Any]]:
        return call(self._connected(), self._connection.request_timeout_s)

    def _result(self, future: Future[Any], what: str, *, ignore: int | None = None, needs: str = "") -> Any:
        try:
            found = future.result(self._connection.request_timeout_s + 1.0)
        except KafkaException as e:
            if ignore is not None and error_of(e).code() == ignore:
                return None
            raise self._connection.failed(e, what, client=self._client, needs=needs) from e
        except TimeoutError as e:
            raise Deadline.after(self._connection.request_timeout_s, what).exceeded(self._connection.bootstrap) from e
        self._connection.answered()
        return found


def _config(spec: TopicSpec) -> dict[str, str]:
    """Kafka's names for a spec. Only closed segments are ever deleted or compacted, hence the segment sizes."""
    limit = spec.max_record_bytes + _OVERHEAD
    config = {
        "cleanup.policy": spec.cleanup,
        "retention.ms": str(spec.retention_ms),
        "retention.bytes": str(spec.retention_bytes),
        "max.message.bytes": str(limit),
        "min.compaction.lag.ms": str(spec.compaction_lag_ms),
    }
    segment_ms = _WEEK_MS
    if spec.retention_ms >= 0:
        segment_ms = min(segment_ms, max(1000, spec.retention_ms // 4))
    if "compact" in spec.cleanup:
        segment_ms = min(segment_ms, max(_HOUR_MS, spec.compaction_lag_ms // 4))
    config["segment.ms"] = str(segment_ms)
    if spec.retention_bytes >= 0:
        config["segment.bytes"] = str(min(_GIB, max(_MIB, limit, spec.retention_bytes // 4)))
    return config


def _cleanup(value: str) -> Cleanup:
    parts = {part.strip() for part in value.split(",")} & {"compact", "delete"}
    return cast("Cleanup", ",".join(sorted(parts)) or "delete")
