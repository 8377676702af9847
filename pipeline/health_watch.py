"""A thread beside the loop that looks at the log from outside, and at the loop itself.

It has its own handle of the log, so nothing that the operator holds is touched from two threads. Every
``monitor.probe_period_s`` it asks for the lag, the committed offsets and the first unprocessed record of each partition
that this process reads. Every second it sees whether a step takes too long, and logs once where it stands.

>>> with closing(HealthWatch(open_log=opener, ...)):                                    # doctest: +SKIP
...     drive(...)
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.health import Backlog, Readiness
from laminar.pipeline.lag import Consumption, oldest_timestamps
from laminar.pipeline.pulse import Pulse
from laminar.schemas.errors import LaminarError
from laminar.streams.log import Log, Reader, TopicPartition
from laminar.streams.meter import Meter

__all__ = ["HealthWatch", "look"]

_TICK_S = 1.0
_JOIN_S = 2.0
_FRAMES = 3
"""Innermost calls that are named when the loop stands still."""

logger = logging.getLogger(__name__)


def look(
    log: Log, reader: Reader, item: Consumption, *, meter: Meter, pulse: Pulse, before: Backlog | None = None
) -> Backlog:
    """What waits for the operator now. Raises LaminarError while the log does not answer."""
    steps, outputs = pulse.steps, meter.progress_at
    committed = log.committed(item.group, item.topic)
    lag = log.lag(item.group, item.topic)
    if item.member:
        group = meter.groups.get(item.group)
        assigned = (group.assigned if group is not None else frozenset()) & lag.keys()
        waiting = {p: lag[p] for p in assigned}
    else:
        assigned, at = frozenset(lag), meter.positions.copy()
        waiting = {p: max(0, reader.bounds(p).end - at[p]) if p in at else lag[p] for p in lag}
    first = {p: committed.get(p, 0) for p in assigned if lag[p]}
    known: dict[TopicPartition, int] = {}
    if before is not None:  # what has not moved is not read again
        known = {p: at for p, at in before.oldest_ms.items() if before.committed.get(p, 0) == first.get(p)}
    return Backlog(
        consumption=item,
        lag=lag,
        committed=committed,
        assigned=assigned,
        waiting=waiting,
        outputs=outputs,
        steps=steps,
        oldest_ms=oldest_timestamps(reader, first, known),
    )


class HealthWatch:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        open_log: Callable[[], Log] | None,
        consumption: Consumption | None,
        readiness: Readiness,
        meter: Meter,
        pulse: Pulse,
        settings: MonitorConfig,
        slow_step_s: float,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Start.

        ``open_log``: a handle of its own for the thread; None: only the loop is looked at. ``on_tick``: called about
        once a second, while the log answers.
        """
        self.backlog: Backlog | None = None
        """The newest look."""
        self.answered_at = 0.0
        """Unix epoch seconds of the newest answer of the log."""
        self.failures = 0
        """Looks that failed."""
        self._open_log = open_log
        self._consumption = consumption
        self._readiness = readiness
        self._meter = meter
        self._pulse = pulse
        self._settings = settings
        self._slow_step_s = slow_step_s
        self._on_tick = on_tick
        self._told_of = 0.0
        self._failing = False
        self._loop = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a call that waits for the log is not waited for."""
        self._over.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        log: Log | None = None
        reader: Reader | None = None
        next_look = 0.0
        try:
            while not self._over.wait(min(_TICK_S, self._settings.probe_period_s)):
                self._watch_loop()
                self._on_tick()
                if self._open_log is None or self._pulse.state == "starting" or time.monotonic() < next_look:
                    continue
                try:
                    log = log or self._open_log()
                    reader = reader or log.reader()
                    self._look(log, reader)
                except LaminarError as error:
                    self._log_failure(str(error))
                    self._readiness.unanswered(str(error))
                next_look = time.monotonic() + self._settings.probe_period_s
        finally:
            if reader is not None:
                reader.close()
            if log is not None:
                log.close()

    def _look(self, log: Log, reader: Reader) -> None:
        item = self._consumption
        if item is None:
            log.topics()
            self._readiness.answered(time.monotonic())
        else:
            self.backlog = look(log, reader, item, meter=self._meter, pulse=self._pulse, before=self.backlog)
            self._readiness.observe(self.backlog, time.monotonic())
        self.answered_at = time.time()
        if self._failing:
            self._failing = False
            logger.info("the log answers again")

    def _log_failure(self, why: str) -> None:
        """Once for each time that the log goes away."""
        self.failures += 1
        if not self._failing:
            self._failing = True
            logger.warning("the log does not say how much waits: %s", why)

    def _watch_loop(self) -> None:
        """Log once when a step takes too long, with where it stands."""
        began, silent_s = self._pulse.beat_at, self._pulse.silent_s(time.monotonic())
        if self._pulse.state == "starting" or silent_s < self._slow_step_s or began == self._told_of:
            return
        self._told_of = began
        frame = sys._current_frames().get(self._loop)
        logger.warning("the loop has stood still for %.1f s%s", silent_s, f" in {_where(frame)}" if frame else "")


def _where(frame: FrameType) -> str:
    """The innermost calls, the last one first."""
    calls: list[str] = []
    step: FrameType | None = frame
    while step is not None and len(calls) < _FRAMES:
        code = step.f_code
        calls.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{step.f_lineno})")
        step = step.f_back
    return " < ".join(calls)
