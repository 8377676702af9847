"""Which consumer group reads which topic, and how far it is behind.

>>> consumptions(config)                                                                # doctest: +SKIP
[Consumption(topic='prompts', group='first.rollout', operator='rollout'), ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.view import LagView
from laminar.schemas.errors import OffsetOutOfRange
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, Reader, TopicPartition

__all__ = ["Consumption", "Progress", "consumptions", "lag_views", "oldest_timestamps"]

Progress = Literal["offsets", "output", "steps"]
"""How one sees that a reader gets on: its committed offsets move; or it writes data (it commits an offset when it takes
a record, and works on it for long); or its steps do something (it keeps its offsets itself)."""

_READS: Mapping[str, tuple[str, Progress]] = {
    "rollout": ("prompts", "output"),
    "reward": ("trajectories.completed", "offsets"),
    "trainer": ("trajectories.scored", "steps"),
    "repack": ("rollouts.status", "offsets"),
}
"""Operator kind -> topic and Progress. The group is ``{run_id}.{name}``."""


_PEEK_S = 0.5
"""For the first record of one partition, and ..."""
_PEEKS_S = 3.0
"""... of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """A group reads a topic."""

    topic: str
    group: str
    operator: str
    progress: Progress

    @property
    def member(self) -> bool:
        """Whether its processes are members of the group, and share the partitions between them."""
        return self.progress != "steps"


def consumptions(config: RunConfig) -> list[Consumption]:
    """All of them, in the order in which the data flows."""
    found = []
    for name, operator in config.operators.items():
        reads = _READS.get(str(getattr(operator, "kind", "")))
        if reads is not None:
            topic, progress = reads
            found.append(Consumption(topic=topic, group=f"{config.name}.{name}", operator=name, progress=progress))
    order = {topic: place for place, topic in enumerate(("prompts", "trajectories.completed", "trajectories.scored"))}
    return sorted(found, key=lambda item: order.get(item.topic, len(order)))


def oldest_timestamps(
    reader: Reader, first: Mapping[TopicPartition, int], known: Mapping[TopicPartition, int] | None = None
) -> dict[TopicPartition, int]:
    """Timestamp (ms) of the first record from each offset on, where there is one; ``known`` ones are not read again."""
    found: dict[TopicPartition, int] = {}
    deadline = Deadline.after(_PEEKS_S, "first unprocessed records")
    for partition, offset in first.items():
        if known is not None and partition in known:
            found[partition] = known[partition]
            continue
        if deadline.passed:
            continue
        try:
            reader.assign({partition: max(offset, reader.bounds(partition).start)})
            records = reader.poll(1, min(_PEEK_S, deadline.remaining()))
        except OffsetOutOfRange:
            continue  # retention went by meanwhile; the operator itself says what that means
        if records:
            found[partition] = records[0].timestamp_ms
    reader.assign({})
    return found


def lag_views(log: Log, config: RunConfig) -> list[LagView]:
    """For the live view."""
    return [
        LagView(topic=item.topic, group=item.group, records=sum(log.lag(item.group, item.topic).values()))
        for item in consumptions(config)
        if item.topic != "rollouts.status"
    ]
