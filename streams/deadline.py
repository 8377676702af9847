"""One deadline, made once, passed through every blocking call.

>>> d = Deadline.after(5.0, "broker answers metadata")
>>> d.remaining() <= 5.0
True
>>> d.check()  # raises DeadlineExceeded("broker answers metadata: not within 5 s") once it has passed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from laminar.schemas.errors import DeadlineExceeded

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A named point on a monotonic clock."""

    name: str
    """What is waited for; it stands in the error."""
    seconds: float
    """The whole span, for the message."""
    at: float
    """Monotonic seconds at which it passes."""
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, name: str, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """A deadline that passes ``seconds`` from now."""
        return cls(name, seconds, clock() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.at - self.clock())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.clock() >= self.at

    def check(self, detail: str = "") -> None:
        """Raise DeadlineExceeded, with the name and ``detail``, if no time is left."""
        if self.passed:
            raise self.exceeded(detail)

    def exceeded(self, detail: str = "") -> DeadlineExceeded:
        """The error to raise when this deadline passes."""
        more = f" ({detail})" if detail else ""
        return DeadlineExceeded(f"{self.name}: not within {self.seconds:g} s{more}")
