"""Which consumer group reads which topic, and how far it is behind.

>>> consumptions(config)                                                                # doctest: +SKIP
[Consumption(topic='prompts', group='first.rollout', operator='rollout'), ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.view import LagView
from laminar.streams.log import Log

__all__ = ["Consumption", "consumptions", "lag_views"]

_READS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "rollout": (("prompts", ""),),
    "reward": (("trajectories.completed", ""),),
    "trainer": (("trajectories.scored", ""),),
    "repack": (("rollouts.status", ""),),
}
"""Operator kind -> (topic, ending of the group's name after ``{run_id}.{name}``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """A group reads a topic."""

    topic: str
    group: str
    operator: str


def consumptions(config: RunConfig) -> list[Consumption]:
    """All of them, in the order in which the data flows."""
    found = [
        Consumption(topic=topic, group=f"{config.name}.{name}{ending}", operator=name)
        for name, operator in config.operators.items()
        for topic, ending in _READS.get(str(getattr(operator, "kind", "")), ())
    ]
    order = {topic: place for place, topic in enumerate(("prompts", "trajectories.completed", "trajectories.scored"))}
    return sorted(found, key=lambda item: order.get(item.topic, len(order)))


def lag_views(log: Log, config: RunConfig) -> list[LagView]:
    """For the live view."""
    return [
        LagView(topic=item.topic, group=item.group, records=sum(log.lag(item.group, item.topic).values()))
        for item in consumptions(config)
        if item.topic != "rollouts.status"
    ]
