"""What a stretch of work costs: seconds on the clock, and CPU seconds of this process and of those that it started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "Meter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one stretch."""

    wall_s: float
    cpu_s: float


class Meter:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        self._cpu = _cpu_s()
        self._began = time.perf_counter()

    def read(self) -> Cost:
        """Up to now."""
        wall_s = time.perf_counter() - self._began
        now = _cpu_s()
        return Cost(wall_s=wall_s, cpu_s=sum(spent - self._cpu.get(pid, 0.0) for pid, spent in now.items()))


def _cpu_s() -> dict[int, float]:
    """Of this process, as 0, and of every process below it."""
    found = {0: time.process_time()}
    for pid in _below("self"):
        try:
            found[pid] = time.clock_gettime(~pid << 3 | 2)  # the kernel's clock of another process: see clock_getres(2)
        except OSError:  # it has ended
            continue
    return found


def _below(pid: str) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            found += [int(child), *_below(child)]
    return found
