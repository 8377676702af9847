"""The catalogue: every topic with its record types, key, partitions, retention and cleanup policy.

The one place that knows which record goes where and under which key.

>>> TOPICS["prompts"].spec.partitions
8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError, EncodeError
from laminar.streams.log import OutRecord, TopicSpec

__all__ = ["TOPICS", "Encoder", "Topic", "outgoing", "topic_specs"]

_HOUR_MS = 3600 * 1000
_DAY_MS = 24 * _HOUR_MS


class Encoder(Protocol):
    """Turns a record into framed bytes (``laminar.schemas.codec.Codec``)."""

    def encode(self, record: r.Record, decoded: tuple[r.Record, bytes] | None = None) -> bytes:
        """Raises EncodeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic of the catalogue."""

    spec: TopicSpec
    records: tuple[type, ...]
    """Record types that may stand on it."""
    key: Callable[[Any], str]
    key_name: str
    doc: str

    @property
    def name(self) -> str:
        """The topic's name on the log."""
        return self.spec.name


def _letter_key(record: r.DeadLetter | r.DeadLetterSettled | r.OffsetsSkipped) -> str:
    if isinstance(record, r.OffsetsSkipped):
        return f"{record.topic}[{record.partition}]"
    return (record.key or b"").decode("utf-8", "replace")


def _topics() -> dict[str, Topic]:
    listed = (
        Topic(
            spec=TopicSpec(name="prompts", partitions=8),
            records=(r.Prompt,),
            key=lambda x: x.prompt_id,
            key_name="prompt_id",
            doc="one group to sample",
        ),
        Topic(
            spec=TopicSpec(name="trajectories.partial", partitions=8),
            records=(r.TrajectoryStarted, r.TrajectoryTokens, r.TrajectoryMoved, r.TrajectoryEnded),
            key=lambda x: x.trajectory_id,
            key_name="trajectory_id",
            doc="lifecycle events: the partial response pool",
        ),
        Topic(
            spec=TopicSpec(name="trajectories.completed", partitions=8),
            records=(r.CompletedTrajectory,),
            key=lambda x: x.group_id,
            key_name="group_id",
            doc="finished trajectories, self-contained",
        ),
        Topic(
            spec=TopicSpec(name="trajectories.scored", partitions=8),
            records=(r.ScoredTrajectory,),
            key=lambda x: x.trajectory.group_id,
            key_name="group_id",
            doc="completed trajectories with their reward",
        ),
        Topic(
            spec=TopicSpec(name="weights.versions", partitions=1, cleanup="compact", compaction_lag_ms=_HOUR_MS),
            records=(r.VersionManifest,),
            key=lambda x: x.run_id,
            key_name="run_id",
            doc="manifests of policy versions",
        ),
        Topic(
            spec=TopicSpec(name="rollouts.status", partitions=1, retention_ms=_DAY_MS),
            records=(r.RolloutStatus,),
            key=lambda x: x.rollout_id,
            key_name="rollout_id",
            doc="heartbeats of rollouts",
        ),
        Topic(
            spec=TopicSpec(name="rollouts.commands", partitions=1, retention_ms=7 * _DAY_MS),
            records=(r.ReleaseCommand, r.AdoptCommand, r.DrainCommand),
            key=lambda x: x.rollout_id,
            key_name="rollout_id",
            doc="Release, Adopt, Drain",
        ),
        Topic(
            spec=TopicSpec(name="relays.status", partitions=1, retention_ms=_DAY_MS),
            records=(r.RelayStatus,),
            key=lambda x: x.relay_id,
            key_name="relay_id",
            doc="heartbeats of relays",
        ),
        Topic(
            spec=TopicSpec(name="training.steps", partitions=1),
            records=(r.TrainerStarted, r.TrainingStep, r.Evaluation, r.DataExhausted, r.RunEnded),
            key=lambda x: x.run_id,
            key_name="run_id",
            doc="one record per optimizer step, and the run's start and end",
        ),
        Topic(
            spec=TopicSpec(name="dead.letters", partitions=1),
            records=(r.DeadLetter, r.DeadLetterSettled, r.OffsetsSkipped),
            key=_letter_key,
            key_name="source key",
            doc="what could not be processed, with the reason, and what was decided about it",
        ),
    )
    return {topic.name: topic for topic in listed}


TOPICS: Mapping[str, Topic] = _topics()
"""Every topic by name."""

_BY_RECORD: Mapping[type, Topic] = {kind: topic for topic in TOPICS.values() for kind in topic.records}


def outgoing(
    codec: Encoder,
    record: r.Record,
    *,
    partition: int | None = None,
    decoded: tuple[r.Record, bytes] | None = None,
) -> OutRecord:
    """The record on its topic, under its key, encoded. Raises EncodeError.

    ``decoded``: a record that it may hold, and the bytes that were decoded to it: see ``Codec.encode``.
    """
    topic = _BY_RECORD.get(type(record))
    if topic is None:
        raise EncodeError(
            f"{type(record).__name__} belongs to no topic (valid: {', '.join(t.__name__ for t in _BY_RECORD)})"
        )
    return OutRecord(
        topic=topic.name, key=topic.key(record).encode(), value=codec.encode(record, decoded), partition=partition
    )


def topic_specs(partitions: Mapping[str, int] | None = None) -> list[TopicSpec]:
    """The specs of all topics, with other numbers of partitions where given. Raises ConfigError."""
    wanted = dict(partitions or {})
    unknown = sorted(set(wanted) - set(TOPICS))
    if unknown:
        raise ConfigError(f"log.partitions.{unknown[0]}: no such topic (valid: {', '.join(TOPICS)})")
    return [replace(t.spec, partitions=wanted.get(t.name, t.spec.partitions)) for t in TOPICS.values()]
