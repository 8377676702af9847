"""``laminar run``: every operator of a run file as its own process on this machine, until the run is over.

Guarantees: a process that fails is started again, ever later; one that says that trying again cannot help ends the run
with its reason; nothing waits without a deadline; when this process ends, in whatever way, no process of the run is
left. The third signal kills what is left at once.

>>> with RunFolder(config) as folder, closing(open_log(config.log)) as log:             # doctest: +SKIP
...     outcome = Supervisor(config, folder, log, screen).run()
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from laminar.pipeline.child import Child, Guard
from laminar.pipeline.config.explaining import secret_environment
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.source import ENV_PREFIX
from laminar.pipeline.exit_code import CRASHED, DO_NOT_RETRY, FATAL, FINISHED, RETRYABLE, USAGE, WRONG_CONFIG
from laminar.pipeline.live import Screen
from laminar.pipeline.placement import environment_of, gpus_here, placed
from laminar.pipeline.run_folder import RunFolder
from laminar.pipeline.view import InstanceView, RunFold
from laminar.pipeline.watch import RunWatch
from laminar.schemas.errors import Retryable
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log

__all__ = ["Outcome", "Supervisor"]

_TICK_S = 0.05
_LOOK_S = 0.5
_ASK_AFTER_S = 5.0
_KILLED_DEADLINE_S = 10.0
_SIGNALS_TO_KILL = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str
    restarts: int
    wall_s: float
    fold: RunFold


class _Signals:
    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        self.first = self.first or signal.Signals(number)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Supervisor:
    """See the module's docstring."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        log: Log,
        screen: Screen,
        *,
        command: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        """The topics must exist. ``command``: other processes than operators, given (operator name, index).

        Raises ConfigError when there are too few GPUs.
        """
        self._config = config
        self._gpus = placed(config, gpus_here())
        self._settings = config.supervisor
        self._folder = folder
        self._screen = screen
        self._watch = RunWatch(config, log)
        self._guard = Guard()
        self._command = command or self._operator_command
        self._children = self._make_children()
        self._started_at = time.time()
        self._looked_at = 0.0

    def _make_children(self) -> list[Child]:
        environment = self._environment()
        children = []
        for name, index in self._config.instances():
            instance = f"{name}-{index}"
            children.append(
                Child(
                    instance,
                    self._command(name, index),
                    log_path=self._folder.log_path(instance),
                    environment={**environment, **environment_of(self._gpus.get((name, index)))},
                    guard=self._guard,
                    settings=self._settings,
                )
            )
        return children

    def _operator_command(self, name: str, index: int) -> list[str]:
        command = [sys.executable, "-m", "laminar.pipeline.process", name, str(index), str(self._folder.config_path)]
        command += [str(self._watch.began_at), str(os.getpid())]
        if self._config.monitor.port:
            command.append(str(self._config.monitor.port + self._config.instances().index((name, index))))
        return command

    def _environment(self) -> Mapping[str, str]:
        """Ours without overrides (the resolved file has them), with secrets and a sane number of threads."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        threads = self._settings.threads_per_process
        share = threads or max(1, (os.cpu_count() or 1) // max(1, len(self._config.instances())))
        kept.setdefault("OMP_NUM_THREADS", str(share))
        return {**kept, "PYTHONUNBUFFERED": "1", **secret_environment(self._config)}

    def run(self) -> Outcome:
        """Start everything, look after it, and take it down again."""
        signals = _Signals()
        code, reason = CRASHED, "the supervisor failed"
        try:
            for child in self._children:
                child.start(time.monotonic())
            code, reason = self._look_after(signals)
            logger.info("stopping: %s", reason)
            self._take_down(signals, ended=code == FINISHED)
        finally:
            try:
                self._kill_all()
                self._look(force=True)
            finally:
                self._guard.close()
                self._screen.close()
                self._watch.close()
                signals.restore()
        return Outcome(
            exit_code=code,
            reason=reason,
            restarts=sum(child.restarts for child in self._children),
            wall_s=time.time() - self._started_at,
            fold=self._watch.fold,
        )

    # -- while it runs

    def _look_after(self, signals: _Signals) -> tuple[int, str]:
        """Until there is a reason to stop: (exit code, reason)."""
        while True:
            if signals.first is not None:
                return 128 + signals.first, f"stopped by {signals.first.name}"
            self._look()
            ended = self._watch.fold.ended
            if ended is not None:
                return FINISHED, ended.reason
            now = time.monotonic()
            for child in self._children:
                if child.reap(now):
                    failure = self._after_exit(child, now)
                    if failure is not None:
                        return failure
                elif child.state == "waiting" and now >= child.restart_at:
                    child.start(now)
            stalled = self._watch.stalled(time.time())
            if stalled is not None:
                return RETRYABLE, stalled
            time.sleep(_TICK_S)

    def _after_exit(self, child: Child, now: float) -> tuple[int, str] | None:
        """Plan a restart; or (exit code, reason) where that cannot help."""
        self._look(force=True)
        if self._watch.fold.ended is not None:
            child.state = "exited"
            return None
        said = f"{child.instance} {child.describe_exit()}"
        if child.exit_code in DO_NOT_RETRY:
            return (USAGE if child.exit_code == WRONG_CONFIG else FATAL), said
        if child.failures_in_a_row > self._settings.max_restarts_in_a_row:
            diagnosis = self._watch.diagnosis(time.time())
            return RETRYABLE, f"{said} ({child.failures_in_a_row} failures in a row); {diagnosis}"
        wait_s = child.schedule_restart(now)
        logger.warning("%s; starting it again in %.1f s (log: %s)", said, wait_s, child.log_path)
        return None

    def _look(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            self._watch.poll()
        except Retryable as error:
            logger.warning("cannot follow the log: %s", error)
            self._watch.trouble = str(error)
            return
        self._watch.trouble = None
        self._screen.show(self._watch.view(time.time(), self._started_at, self._instances()))

    def _instances(self) -> list[InstanceView]:
        return [self._instance(child) for child in self._children]

    def _instance(self, child: Child) -> InstanceView:
        state: str = {"waiting": "restarting", "exited": "stopped"}.get(child.state, child.state)
        if child.state == "running" and not child.ready:
            return InstanceView(instance=child.instance, state="starting", restarts=child.restarts)
        detail = "" if child.state == "running" or child.exit_code == 0 else child.describe_exit()
        beat = self._watch.fold.heartbeat(child.instance)
        if beat is not None and child.state == "running":
            status = beat.status
            state = status.state
            age_s = beat.age_s(time.time())
            detail = beat.words
            if age_s > max(self._watch.dead_after_s, status.lease_s):
                state, detail = "silent", f"last heartbeat {age_s:.0f} s ago"
        return InstanceView(instance=child.instance, state=state, detail=detail, restarts=child.restarts)

    # -- the end

    def _alive(self) -> list[Child]:
        now = time.monotonic()
        for child in self._children:
            child.reap(now)
            if child.state == "waiting":
                child.terminate()
        return [child for child in self._children if child.state == "running"]

    def _take_down(self, signals: _Signals, *, ended: bool) -> None:
        """Let everything drain within one deadline.

        Ended: they leave by themselves, having read the same record; those that have not begun to read are asked to.
        """
        heard = signals.count
        deadline = Deadline.after(self._settings.drain_timeout_s, "drain of all processes")
        asked = False
        while left := self._alive():
            self._look()
            if not asked and (not ended or deadline.remaining() < self._settings.drain_timeout_s - _ASK_AFTER_S):
                asked = True
                for child in left:
                    child.terminate()
            if signals.count >= _SIGNALS_TO_KILL or deadline.passed:
                why = f"{signals.count} signals" if signals.count >= _SIGNALS_TO_KILL else str(deadline.exceeded())
                logger.warning("killing %s: %s", ", ".join(child.instance for child in left), why)
                return
            if signals.count > heard:
                heard = signals.count
                logger.warning(
                    "still draining %s, %.0f s left (signal number %d kills)",
                    ", ".join(child.instance for child in left),
                    deadline.remaining(),
                    _SIGNALS_TO_KILL,
                )
                for child in left:
                    child.terminate()
            time.sleep(_TICK_S)

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()
        deadline = Deadline.after(_KILLED_DEADLINE_S, "end of killed processes")
        while self._alive():
            deadline.check(", ".join(child.instance for child in self._alive()))
            time.sleep(_TICK_S)
