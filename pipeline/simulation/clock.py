"""The one clock of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EPOCH_S", "VirtualClock"]

EPOCH_S = 1_000_000.0
"""When every simulation starts, Unix epoch seconds."""


@dataclass(slots=True)
class VirtualClock:
    """Time that passes only when it is told to."""

    now: float = EPOCH_S
    """Unix epoch seconds."""

    def __call__(self) -> float:
        return self.now

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now - EPOCH_S

    def reach(self, at: float) -> None:
        """Let time pass until then; it never runs back."""
        self.now = max(self.now, at)
