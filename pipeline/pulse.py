"""An operator's signs of life: what its loop has done, as of now. The loop writes, other threads read.

>>> pulse = Pulse()
>>> pulse.state
'starting'
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from laminar.streams.meter import Histogram

__all__ = ["STATES", "Pulse", "State"]

State = Literal["starting", "running", "draining", "closed"]
STATES: tuple[State, ...] = ("starting", "running", "draining", "closed")

_STEP_S = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


@dataclass(slots=True)
class Pulse:
    """See the module's docstring."""

    state: State = "starting"
    steps: int = 0
    """Steps that did something."""
    idle_steps: int = 0
    step_s: Histogram = field(default_factory=lambda: Histogram(_STEP_S))
    """Durations of steps."""
    longest_step_s: float = 0.0
    last_step_at: float = 0.0
    """Unix epoch seconds at which the newest step finished."""
    beat_at: float = field(default_factory=time.monotonic)
    """The same in monotonic seconds, or when the state changed; a wall clock that is set does not stop the heart."""

    def silent_s(self, now: float) -> float:
        """How long the loop has not come round: the lag of everything that waits for it. ``now``: monotonic seconds."""
        return max(0.0, now - self.beat_at)

    def enter(self, state: State) -> None:
        """Change the state."""
        self.beat_at = time.monotonic()
        self.state = state

    def count(self, *, worked: bool, seconds: float, at: float) -> None:
        """Count a step that has just finished, at Unix epoch seconds ``at``."""
        self.steps += worked
        self.idle_steps += not worked
        self.step_s.observe(seconds)
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.last_step_at = at
        self.beat_at = time.monotonic()
