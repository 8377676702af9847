"""Epoch seconds that never jump.

Everything that an operator does by time (heartbeats, leases, polls, back-offs) goes by one clock. Were it the wall
clock, one that is set back by an hour would silence a process for an hour. So the wall clock is read once, at the
start; from there the time that has passed is added, time in which the machine slept included.

>>> clock = SteadyClock()
>>> clock() <= clock()
True
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SteadyClock"]


def _elapsed() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: goes on while the machine sleeps
        try:
            time.clock_gettime(time.CLOCK_BOOTTIME)
        except OSError:  # a kernel or sandbox without it
            return time.monotonic
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic


class SteadyClock:
    """See the module's docstring."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] | None = None) -> None:
        """``wall``: Unix epoch seconds, read once; ``elapsed``: seconds since whenever."""
        self._elapsed = elapsed or _elapsed()
        self._offset = wall() - self._elapsed()

    def __call__(self) -> float:
        """Unix epoch seconds."""
        return self._offset + self._elapsed()
