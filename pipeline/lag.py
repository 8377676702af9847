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
from laminar.streams.log import Log

__all__ = ["Consumption", "Progress", "consumptions", "lag_views"]

Progress = Literal["offsets", "output", "steps"]
"""How one sees that a reader gets on: its committed offsets move; or it writes data (it commits an offset when it takes
a record, and works on it for long); or its steps do something (it keeps its offsets itself)."""

_READS: Mapping[str, tuple[str, Progress]] = {
    "rollout": ("prompts", "output"),
    "reward": ("trajectories.completed", "offsets"),
    "trainer": ("trajectories.scored", "steps"),
    "repack": ("rollouts.status", "offsets"),
}
"""Operator kind -> topic. The group is ``{run_id}.{name}``."""


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


def lag_views(log: Log, config: RunConfig) -> list[LagView]:
    """For the live view."""
    return [
        LagView(topic=item.topic, group=item.group, records=sum(log.lag(item.group, item.topic).values()))
        for item in consumptions(config)
        if item.topic != "rollouts.status"
    ]
