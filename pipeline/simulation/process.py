"""A simulated process: an operator, its own handle on the log, and what is going to strike it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from laminar.operators.operator import Operator
from laminar.pipeline.simulation.engine import SimulatedEngine
from laminar.pipeline.simulation.fault import Fault
from laminar.streams.log import TopicPartition
from laminar.streams.memory import MemoryLog, Point

__all__ = ["Process", "Reach"]


@dataclass(slots=True, eq=False)
class Process:
    """One life of an instance; its next life is another Process."""

    instance: str
    reach: Reach
    armed: list[Fault]
    """Shared by all lives of the instance."""
    log: MemoryLog | None = None
    operator: Operator | None = None
    """None: it is down."""
    engine: SimulatedEngine | None = None
    next_at: float = 0.0
    """When it steps, or starts, next."""
    idle_s: float = 0.0
    stopped: bool = False
    """It is inside a step, and others go on meanwhile."""
    replaced: bool = False
    """Another one runs under its name."""
    draining: bool = False

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.instance.rsplit("-", 1)[0]


@dataclass(slots=True)
class Reach:
    """What the memory log asks a process's faults. Implements ``laminar.streams.memory.Faults``."""

    strike: Callable[[str], None]
    """Called at every point of a transaction."""
    clock: Callable[[], float]
    broker_back_at: Callable[[], float]
    cut_until: float = 0.0
    late_until: dict[str, float] = field(default_factory=dict)
    """By topic."""

    def at(self, point: Point, transactional_id: str) -> None:
        """See Faults."""
        del transactional_id
        self.strike(point)

    def late(self, who: str, partition: TopicPartition) -> bool:
        """See Faults."""
        del who
        return bool(self.late_until) and self.late_until.get(partition.topic, 0.0) > self.clock()

    def away(self) -> bool:
        """See Faults."""
        return self.clock() < self.cut_until or self.clock() < self.broker_back_at()
