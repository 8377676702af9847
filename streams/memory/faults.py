"""Where a simulator may interfere with a memory log. Each handle (``MemoryLog``) has its own faults."""

from __future__ import annotations

from typing import Literal, Protocol

from laminar.schemas.errors import Unavailable
from laminar.streams.log import TopicPartition

__all__ = ["NO_FAULTS", "Faults", "NoFaults", "Point", "Undecided"]

Point = Literal["before_commit", "inside_commit", "after_commit"]
"""``before_commit``: nothing has reached the broker. ``inside_commit``: the records have, the decision has not; an
exception here leaves the transaction hanging, as a dead process does: readers stop in front of it until the id's
successor fences it or its timeout passes. ``after_commit``: committed, but the producer does not hear of it."""


class Undecided(Unavailable):
    """Raised at ``inside_commit``: no answer, and the broker itself decides at ``due`` (clock seconds) at the latest.

    Until then readers stop in front of it. Whoever needs the outcome earlier (the same producer, its successor, the
    next owner of its offsets) waits for it, as on Kafka: here that is to decide it at once.
    """

    def __init__(self, message: str, *, commits: bool, due: float) -> None:
        super().__init__(message)
        self.commits = commits
        self.due = due


class Faults(Protocol):
    """Asked at every point; what it raises flies to the caller."""

    def at(self, point: Point, transactional_id: str) -> None:
        """Return, or raise: a LaminarError, or the simulator's own exception for a crash.

        It may take its time: others may use the broker before it returns, as they do while a process is stopped.
        """

    def late(self, who: str, partition: TopicPartition) -> bool:
        """True: this poll of ``who`` (``group/instance`` or ``reader``) gets nothing of the partition yet."""

    def away(self) -> bool:
        """True: the broker does not answer this handle. Requests raise Unavailable, polls return nothing."""


class NoFaults:
    """Nothing goes wrong."""

    def at(self, point: Point, transactional_id: str) -> None:
        """Nothing."""

    def late(self, who: str, partition: TopicPartition) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def away(self) -> bool:
        """Never."""
        return False


NO_FAULTS = NoFaults()
"""The default."""
