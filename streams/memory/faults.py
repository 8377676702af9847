"""Where a simulator may interfere with a memory log. Each handle (``MemoryLog``) has its own faults."""

from __future__ import annotations

from typing import Literal, Protocol

from laminar.streams.log import TopicPartition

__all__ = ["NO_FAULTS", "Faults", "NoFaults", "Point"]

Point = Literal["before_commit", "inside_commit", "after_commit"]
"""``before_commit``: nothing has reached the broker. ``inside_commit``: the records have, the decision has not; an
exception here leaves the transaction hanging, as a dead process does: readers stop in front of it until the id's
successor fences it or its timeout passes. ``after_commit``: committed, but the producer does not hear of it."""


class Faults(Protocol):
    """Asked at every point; what it raises flies to the caller."""

    def at(self, point: Point, transactional_id: str) -> None:
        """Return, or raise: a LaminarError, or the simulator's own exception for a crash."""

    def late(self, who: str, partition: TopicPartition) -> bool:
        """True: this poll of ``who`` (``group/instance`` or ``reader``) gets nothing of the partition yet."""


class NoFaults:
    """Nothing goes wrong."""

    def at(self, point: Point, transactional_id: str) -> None:
        """Nothing."""

    def late(self, who: str, partition: TopicPartition) -> bool:  # noqa: ARG002
        """Never."""
        return False


NO_FAULTS = NoFaults()
"""The default."""
