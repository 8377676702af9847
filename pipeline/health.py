"""Whether a process lives and is ready, and if not, why. Pure: what was seen comes in, with its time.

Alive: its loop makes steps. Ready: alive, asked to stop by nobody, the log answers, and it has partitions and gets on
with what waits in them; or it has none, as a standby of a group that gets on. Times are monotonic seconds, except
where a name says otherwise.

>>> readiness = Readiness(MonitorConfig(), consumption=None, now=0.0)
>>> readiness.reasons(5.0)
['the log has not answered yet']
>>> readiness.answered(6.0)
>>> readiness.reasons(7.0)
[]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.lag import Consumption
from laminar.pipeline.pulse import Pulse
from laminar.streams.log import TopicPartition

__all__ = ["Backlog", "Health", "Readiness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What one look at the log saw of the topic that an operator reads."""

    consumption: Consumption
    lag: Mapping[TopicPartition, int]
    """Of the whole group, by committed offsets."""
    committed: Mapping[TopicPartition, int]
    assigned: frozenset[TopicPartition]
    """What this process reads."""
    waiting: Mapping[TopicPartition, int]
    """Of ``assigned``: what is not processed, or, where the operator keeps its offsets itself, not read."""
    outputs: float = 0.0
    """Grows whenever the process has written data."""
    steps: int = 0
    """Steps of the process that did something."""
    oldest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Timestamp of the first unprocessed record of each partition of ``assigned`` that has one."""


class Readiness:
    """Folds what was seen of the log into reasons why the process is not ready."""

    def __init__(self, settings: MonitorConfig, *, consumption: Consumption | None, now: float) -> None:
        """``consumption``: what the operator reads; None: nothing that waits for it."""
        self._settings = settings
        self._consumption = consumption
        self._answered_at: float | None = None
        self._began = now
        self._trouble = ""
        self._unassigned_since = now
        self._stuck_since: dict[str, float] = {}
        self._marks: dict[str, object] = {}
        self._backlog: Backlog | None = None

    def answered(self, now: float) -> None:
        """The log answered."""
        self._answered_at, self._trouble = now, ""

    def unanswered(self, why: str) -> None:
        """The log did not answer."""
        self._trouble = why

    def observe(self, backlog: Backlog, now: float) -> None:
        """Take the next look."""
        self.answered(now)
        self._backlog = backlog
        if backlog.assigned:
            self._unassigned_since = now
        counts, marks = _progress(backlog)
        for name in [name for name in self._marks if name not in marks]:
            del self._marks[name], self._stuck_since[name]
        for name, mark in marks.items():
            if not counts[name] or self._marks.get(name) != mark:
                self._stuck_since[name] = now
            self._marks[name] = mark

    def reasons(self, now: float) -> list[str]:
        """Why the process is not ready; empty: it is."""
        if self._answered_at is None:
            waiting = f": {self._trouble}" if self._trouble else ""
            return [f"the log has not answered yet{waiting}"]
        silent_s = now - self._answered_at
        if self._trouble and silent_s >= self._settings.unanswered_after_s:
            return [f"the log has not answered for {silent_s:.0f} s: {self._trouble}"]
        if self._backlog is None:
            return [] if self._consumption is None else ["the log has not been looked at yet"]
        return self._unassigned(now, self._backlog) + self._stuck(now, self._backlog)

    def _unassigned(self, now: float, backlog: Backlog) -> list[str]:
        if backlog.assigned or now - self._unassigned_since >= self._settings.standby_after_s:
            return []
        item = backlog.consumption
        return [f"{item.topic}: no partition is assigned to this process yet (group {item.group})"]

    def _stuck(self, now: float, backlog: Backlog) -> list[str]:
        counts, _ = _progress(backlog)
        found = []
        for name, since in sorted(self._stuck_since.items()):
            stuck_s = now - since
            if counts.get(name) and stuck_s >= self._settings.stuck_after_s:
                standby = "" if backlog.assigned else "no partition is assigned to this process, and "
                found.append(
                    f"{name}: {standby}{counts[name]} records wait with no progress for {stuck_s:.0f} s,"
                    f" since {_wall(now - since)} (group {backlog.consumption.group})"
                )
        return found


def _progress(backlog: Backlog) -> tuple[dict[str, int], dict[str, object]]:
    """Records that wait, and what changes with progress, for each thing that can be stuck by itself."""
    topic = backlog.consumption.topic
    if not backlog.assigned:
        return {topic: sum(backlog.lag.values())}, {topic: tuple(sorted(backlog.committed.items()))}
    match backlog.consumption.progress:
        case "offsets":
            waiting = {str(p): backlog.waiting.get(p, 0) for p in backlog.assigned}
            return waiting, {str(p): backlog.committed.get(p) for p in backlog.assigned}
        case "output":
            return {topic: sum(backlog.waiting.values())}, {topic: (backlog.outputs, backlog.assigned)}
        case "steps":
            return {topic: sum(backlog.waiting.values())}, {topic: backlog.steps}


def _wall(seconds_ago: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Health:
    """What the probes are answered with."""

    def __init__(
        self,
        pulse: Pulse,
        readiness: Readiness,
        settings: MonitorConfig,
        *,
        stopping: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``stopping``: who asked the process to stop; empty: nobody. ``clock``: monotonic seconds."""
        self.pulse = pulse
        self.readiness = readiness
        self._settings = settings
        self._stopping = stopping
        self.clock = clock

    def not_live(self) -> list[str]:
        """Why the process should be killed; empty: it lives. One that is still starting does not live yet."""
        silent_s = self.pulse.silent_s(self.clock())
        if self.pulse.state == "starting":
            return [f"starting for {silent_s:.0f} s"]
        if silent_s >= self._settings.stalled_after_s:
            return [f"no step has finished for {silent_s:.1f} s (limit {self._settings.stalled_after_s:g} s)"]
        return []

    def not_ready(self) -> list[str]:
        """Why the process should not be counted on; empty: it is ready."""
        asked = self._stopping()
        if asked:
            return [f"stopping: {asked}"]
        if self.pulse.state in ("draining", "closed"):
            return [f"{self.pulse.state}: the run ended"]
        return self.not_live() or self.readiness.reasons(self.clock())
