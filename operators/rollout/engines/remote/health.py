"""When an engine's process counts as wedged, and when a new one is started. Times are of a monotonic clock.

>>> pause = Pause(first_s=0.5, longest_s=4.0)
>>> [pause.next() for _ in range(5)]
[0.5, 1.0, 2.0, 4.0, 4.0]
"""

from __future__ import annotations

__all__ = ["Pause", "Silence"]

_LOOKS = 4
"""At least so many looks in vain are a silence: one long gap between two looks may be ours."""


class Silence:
    """How long nothing was heard, as far as somebody listened."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self._most_s = max(1.0, limit_s / _LOOKS) if limit_s > 1 else limit_s / _LOOKS
        self._looked_at = now
        self._silent_s = 0.0

    def heard(self, now: float) -> None:
        """Something was heard, or nothing is to be heard."""
        self._looked_at, self._silent_s = now, 0.0

    def lasts(self, now: float) -> bool:
        """Looked in vain again: whether that has lasted for too long."""
        self._silent_s += min(max(0.0, now - self._looked_at), self._most_s)
        self._looked_at = now
        return self._silent_s >= self.limit_s


class Pause:
    """Waits that double from one to the next, until something went well."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._n = 0

    def next(self) -> float:
        """Seconds to wait this time."""
        wait_s = min(self._first_s * 2.0 ** min(self._n, 30), self._longest_s)
        self._n += 1
        return wait_s

    def reset(self) -> None:
        """Something went well."""
        self._n = 0
