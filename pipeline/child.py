"""One operator's process under the supervisor: start, restart with back-off, stop, kill. No orphan, ever.

Each process leads its own group (and session), so that its own children go with it. A ``Guard`` process kills the
groups when the supervisor is gone without a word.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, cast

from laminar.pipeline import guard
from laminar.pipeline.config.models import SupervisorConfig
from laminar.pipeline.runner import READY

__all__ = ["Child", "ChildState", "Guard", "backoff_s"]

_READ_BYTES = 65536

ChildState = Literal["running", "waiting", "exited"]
"""``waiting``: it will be restarted."""


def backoff_s(failures: int, settings: SupervisorConfig) -> float:
    """Seconds before the next restart after so many failures in a row (at least 1).

    >>> [backoff_s(n, SupervisorConfig()) for n in (1, 2, 3, 99)]
    [0.5, 1.0, 2.0, 10.0]
    """
    return min(settings.restart_backoff_s * 2.0 ** min(failures - 1, 30), settings.restart_backoff_max_s)


class Guard:
    """See laminar.pipeline.guard."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def _say(self, word: str) -> None:
        try:
            cast("BinaryIO", self._process.stdin).write(word.encode())
        except BrokenPipeError:
            return  # somebody killed it; the processes' own bond to us is left

    def watch(self, group: int) -> None:
        """Kill this group when we are gone."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group is gone."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Let it kill what is still registered, and end."""
        cast("BinaryIO", self._process.stdin).close()
        self._process.wait(timeout=10.0)


class Child:
    """One instance of an operator."""

    def __init__(
        self,
        instance: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        guard: Guard,
        settings: SupervisorConfig,
    ) -> None:
        self.instance = instance
        self.restarts = 0
        self.failures_in_a_row = 0
        self.exit_code: int | None = None
        """Of the newest process; negative: the signal that killed it."""
        self.state: ChildState = "waiting"
        self.restart_at = 0.0
        """Monotonic seconds."""
        self.log_path = log_path
        self._command = list(command)
        self._environment = dict(environment)
        self._guard = guard
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._log_from = 0
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self.state == "running" else None

    def start(self, now: float) -> None:
        """Start the process."""
        self._ready = False
        with self.log_path.open("ab") as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)
        self._started_at = now
        self.exit_code = None
        self.state = "running"

    @property
    def ready(self) -> bool:
        """Whether the running process has logged that its operator is built."""
        if not self._ready and self.state == "running":
            with self.log_path.open("rb") as log:
                log.seek(self._log_from)
                self._ready = READY.encode() in log.read(_READ_BYTES)
        return self._ready and self.state == "running"

    def reap(self, now: float) -> bool:
        """Whether the process ended since the last call. What it left in its group is killed."""
        if self.state != "running" or self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return False
        self._signal_group(signal.SIGKILL)
        self._guard.forget(self._process.pid)
        self.exit_code = code
        self.state = "exited"
        if now - self._started_at >= self._settings.restart_stable_s:
            self.failures_in_a_row = 0
        if code != 0:
            self.failures_in_a_row += 1
        return True

    def schedule_restart(self, now: float) -> float:
        """Plan to start again; return the wait in seconds."""
        wait_s = backoff_s(max(1, self.failures_in_a_row), self._settings)
        self.state, self.restart_at = "waiting", now + wait_s
        self.restarts += 1
        return wait_s

    def terminate(self) -> None:
        """Ask to drain."""
        if self.state == "running" and self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        elif self.state == "waiting":
            self.state = "exited"

    def kill(self) -> None:
        """Kill the group."""
        if self.state == "running":
            self._signal_group(signal.SIGKILL)
        elif self.state == "waiting":
            self.state = "exited"

    def _signal_group(self, number: int) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def last_words(self) -> str:
        """The newest error that the process wrote into its log, or its last line."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_from, self.log_path.stat().st_size - _READ_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                if line.strip():
                    return line.strip()  # a traceback's last line
                continue
            if isinstance(entry, dict) and entry.get("level") == "error":
                return str(entry.get("message", ""))
        return ""

    def describe_exit(self) -> str:
        """How the newest process ended, for messages."""
        code = self.exit_code
        if code is None:
            return "runs"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        words = (self.last_words() or f"{self.log_path} has no word of it (is the disk full?)") if code else ""
        return f"exited with code {code}" + (f": {words}" if words else "")
