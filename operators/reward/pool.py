"""Runs a reward function in processes that may be killed: no call outlasts its limit, none takes the others with it.

A call that raises, crashes or hangs is tried again, ``max_attempts`` times in all; then its answer is a failure. (A
function that says by itself that it cannot tell is not asked again.) A killed process is replaced at once. No method
waits for a call.

>>> pool = Pool("my_rewards:score", concurrency=2, timeout_s=5.0)                                # doctest: +SKIP
>>> pool.start(Deadline.after(60, "reward function"))                                            # doctest: +SKIP
>>> pool.submit(1, trajectory)                                                                   # doctest: +SKIP
>>> pool.collect()                                                                               # doctest: +SKIP
[(1, Answer(...))]
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from laminar.operators.reward.functions import Score
from laminar.operators.reward.process import Answer, Broken, Ready, Setup
from laminar.schemas.errors import ConfigError, Unavailable
from laminar.schemas.records import CompletedTrajectory
from laminar.streams.deadline import Deadline

__all__ = ["Pool"]

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-c", "from laminar.operators.reward.process import main; main()")
_REAP_S = 5.0
_STUCK = 0.5
"""A call that has taken this part of its limit is logged with its trajectory."""


@dataclass(slots=True, eq=False)
class _Task:
    ticket: int
    trajectory: CompletedTrajectory
    attempt: int = 0
    told: bool = False
    """It was logged that this attempt takes long."""


@dataclass(slots=True, eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    since: float
    """When it was started, or given its task."""
    ready: bool = False
    task: _Task | None = None


class Pool:
    """``concurrency`` processes and a queue in front of them. One thread only."""

    def __init__(
        self,
        function: str,
        *,
        options: Mapping[str, Any] | None = None,
        concurrency: int = 2,
        timeout_s: float = 30.0,
        max_attempts: int = 2,
        startup_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: monotonic seconds."""
        self._setup = Setup(function, dict(options or {}), os.getpid())
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._startup_timeout_s = startup_timeout_s
        self._clock = clock
        self._queue: deque[_Task] = deque()
        self._done: list[tuple[int, Answer]] = []
        self._failed_starts = 0
        self._processes = [self._spawn() for _ in range(concurrency)]
        self.kills = 0
        """Processes killed at the limit of a call, since start."""

    def start(self, deadline: Deadline) -> None:
        """Wait until one process has the function. Raises ConfigError (it cannot be imported) or DeadlineExceeded."""
        while not any(process.ready for process in self._processes):
            wait([process.connection for process in self._processes], min(0.2, deadline.remaining()))
            self._advance()
            deadline.check(f"importing {self._setup.function}")

    def submit(self, ticket: int, trajectory: CompletedTrajectory) -> None:
        """Queue one call."""
        self._queue.append(_Task(ticket, trajectory))
        self._dispatch()

    def collect(self) -> list[tuple[int, Answer]]:
        """What was answered since. Raises ConfigError or Unavailable when no process can be started any more."""
        self._advance()
        self._dispatch()
        done, self._done = self._done, []
        return done

    def cancel(self, ticket: int) -> None:
        """Forget a queued call; a running one ends by itself, or at its limit, and is forgotten by its caller."""
        self._queue = deque(task for task in self._queue if task.ticket != ticket)

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            self._end(process)
        self._processes.clear()

    def _spawn(self) -> _Process:
        ours, theirs = Pipe()
        with theirs:
            popen = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the user's function prints is a log line, not a result
            )
        ours.send(self._setup)
        return _Process(popen, ours, self._clock())

    def _end(self, process: _Process) -> None:
        process.popen.kill()
        process.connection.close()
        process.popen.wait(_REAP_S)

    def _advance(self) -> None:
        """Take every message, enforce every limit, replace every process that is gone."""
        for index, process in enumerate(self._processes):
            while process.connection.poll():
                try:
                    message = process.connection.recv()
                except (EOFError, OSError):
                    self._lost(index, f"its process ended with status {process.popen.wait(_REAP_S)}")
                    break
                self._received(process, message)
            else:
                self._enforce(index)

    def _received(self, process: _Process, message: object) -> None:
        if isinstance(message, Ready):
            process.ready = True
            self._failed_starts = 0
        elif isinstance(message, Broken):
            raise ConfigError(f"{self._setup.function}: {message.reason}")
        elif isinstance(message, Answer) and process.task is not None:
            task, process.task = process.task, None
            self._answer(task, message)

    def _enforce(self, index: int) -> None:
        process = self._processes[index]
        age = self._clock() - process.since
        if process.task is not None and age > self._timeout_s:
            self.kills += 1
            self._lost(index, f"no answer within {self._timeout_s:g} s")
        elif process.task is not None and age > _STUCK * self._timeout_s and not process.task.told:
            process.task.told = True
            logger.warning(
                "%s: the reward function has been at it for %.1f s in process %d (limit %g s)",
                process.task.trajectory.trajectory_id,
                age,
                process.popen.pid,
                self._timeout_s,
            )
        elif not process.ready and age > self._startup_timeout_s:
            self._lost(index, f"not imported within {self._startup_timeout_s:g} s")

    def _lost(self, index: int, reason: str) -> None:
        """The process is killed and replaced; its task, if any, has failed."""
        process = self._processes[index]
        self._end(process)
        if process.ready:
            logger.warning("reward process %d: %s", process.popen.pid, reason)
        else:
            self._failed_starts += 1
            if self._failed_starts > 2 * len(self._processes):
                raise Unavailable(f"reward function {self._setup.function}: no process starts: {reason}")
        self._processes[index] = self._spawn()
        if process.task is not None:
            latency_ms = (self._clock() - process.since) * 1e3
            self._answer(process.task, Answer(Score(reward=None, failure=reason), latency_ms, may_retry=True))

    def _answer(self, task: _Task, answer: Answer) -> None:
        failure = answer.score.failure
        if failure is not None:
            logger.warning(
                "%s: attempt %d of %d failed after %.0f ms: %s",
                task.trajectory.trajectory_id,
                task.attempt,
                self._max_attempts,
                answer.latency_ms,
                failure,
            )
            if answer.may_retry and task.attempt < self._max_attempts:
                self._queue.append(task)
                return
        self._done.append((task.ticket, answer))

    def _dispatch(self) -> None:
        for process in self._processes:
            if not self._queue:
                return
            if process.ready and process.task is None:
                task = self._queue.popleft()
                task.attempt += 1
                task.told = False
                process.task, process.since = task, self._clock()
                with suppress(OSError):  # it died while idle: the next collect sees that and tries again elsewhere
                    process.connection.send(task.trajectory)
