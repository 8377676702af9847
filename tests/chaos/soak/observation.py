"""What is seen while the campaign runs, from the processes' own log files: they are there when the broker is not."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from laminar.pipeline.runner import READY
from tests.chaos.soak.deployment import Deployment

__all__ = ["LogTail", "Observation", "Recovery"]

_STEP = re.compile(rb"step (\d+): version")


class LogTail:
    """New bytes of one file, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def read(self) -> bytes:
        """What was added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                found = file.read()
        except OSError:
            return b""
        end = found.rfind(b"\n") + 1
        self._at += end
        return found[:end]


@dataclass(slots=True)
class Recovery:
    """From a fault until the process was ready again."""

    instance: str
    kind: str
    began: float
    tail: LogTail
    ended: float | None = None
    superseded: bool = False
    """It was killed again before it was ready, or could not write that it was."""

    @property
    def seconds(self) -> float | None:
        """None while it lasts."""
        return None if self.ended is None else self.ended - self.began


@dataclass
class Observation:
    """See the module's docstring. Times are monotonic seconds."""

    deployment: Deployment
    recoveries: list[Recovery] = field(default_factory=list)
    step: int = 0
    steps_seen: int = 0
    """Optimizer steps, those that a restart made again included."""
    last_progress: float = field(default_factory=time.monotonic)
    longest_stall_s: float = 0.0
    longest_away_s: float = 0.0
    """The longest time without a step that a fault of two minutes was part of."""
    _away: bool = False

    def __post_init__(self) -> None:
        self._trainer = LogTail(self.deployment.log_path("trainer-0"))

    def look(self) -> None:
        """Read what is new."""
        now = time.monotonic()
        for found in _STEP.findall(self._trainer.read()):
            stall_s = now - self.last_progress
            if self._away:
                self.longest_away_s = max(self.longest_away_s, stall_s)
            else:
                self.longest_stall_s = max(self.longest_stall_s, stall_s)
            self._away = False
            self.last_progress = now
            self.step = max(self.step, int(found))
            self.steps_seen += 1
        for recovery in self.recoveries:
            if recovery.ended is None and not recovery.superseded and READY.encode() in recovery.tail.read():
                recovery.ended = now

    def away(self) -> None:
        """The broker is gone on purpose: this time without a step is counted apart."""
        self._away = True

    def expect(self, instance: str, kind: str) -> None:
        """A process was killed now; it will be ready again."""
        for recovery in self.recoveries:
            if recovery.instance == instance and recovery.ended is None:
                recovery.superseded = True
        tail = LogTail(self.deployment.log_path(instance))
        self.recoveries.append(Recovery(instance, kind, time.monotonic(), tail))

    def excuse(self) -> None:
        """The disk was full: what was ready again meanwhile could not say so."""
        for recovery in self.recoveries:
            recovery.superseded = recovery.superseded or recovery.ended is None

    def waiting(self) -> list[str]:
        """Processes that are not ready again yet."""
        return sorted({one.instance for one in self.recoveries if one.ended is None and not one.superseded})

    def stalled_s(self) -> float:
        """Time since the last step."""
        return time.monotonic() - self.last_progress
