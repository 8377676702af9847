"""The process that an engine lives in, as its starter sees it: one start, one end, its last words."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from laminar.operators.rollout.engines.remote.stream import Stream

__all__ = ["EngineProcess"]

_KEPT_LINES = 200
_WORDS = 500
"""Characters of last words."""
_DUMP_S = 0.5
"""For a wedged process to say where it is."""
_REAP_S = 5.0
_SETTLE_S = 1.0
_WORDS_S = 0.3
_DUMP = "most recent call first"

logger = logging.getLogger(__name__)


class EngineProcess:
    """A fresh interpreter that leads a session, and so a group, of its own. It dies with this process.

    What it writes to stderr goes to this process's log, line by line.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        here, there = socket.socketpair()
        life_there, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "laminar.operators.rollout.engines.remote.bond",
                    str(there.fileno()), str(life_there),
                ],
                pass_fds=(there.fileno(), life_there),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        except BaseException:
            here.close()
            os.close(self._life)
            raise
        finally:
            there.close()
            os.close(life_there)
        self.stream = Stream(here)
        self.pid = self._process.pid
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._gone = self._killed_by_us = False
        self._reader = threading.Thread(target=self._read_lines, name="engine-stderr", daemon=True)
        self._reader.start()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def settle(self) -> None:
        """It is about to end: wait for that a little."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SETTLE_S)
        self._reader.join(_WORDS_S)

    def describe_end(self) -> str:
        """How it ended, with its last words."""
        code = self._process.poll()
        if code is None or self._killed_by_us:
            return f"(pid {self.pid}) closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = self.last_words()
        return f"(pid {self.pid}) {how}" + (f": {words}" if words else "")

    @property
    def killed(self) -> bool:
        """Whether somebody else ended it by SIGKILL."""
        return self._process.poll() == -signal.SIGKILL and not self._killed_by_us

    @property
    def output(self) -> str:
        """The newest lines that it wrote."""
        return "\n".join(self._lines)

    def last_words(self) -> str:
        """The end of what it wrote, in one line; where it hung, if it said so."""
        lines = [line.strip() for line in list(self._lines) if line.strip()]
        dump = next((at for at in range(len(lines) - 1, -1, -1) if _DUMP in lines[at]), None)
        chosen = lines[-3:] if dump is None else lines[dump + 1 : dump + 4]
        said = " | ".join(chosen)
        return said if len(said) <= _WORDS else f"... {said[-_WORDS:]}"

    def interrogate(self) -> None:
        """Let a wedged process write where it is, if it still can."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DUMP_S)

    def end(self, within_s: float = 0.0) -> None:
        """Let it end by itself within so many seconds, then kill it, and whatever it has started. Once."""
        if self._gone:
            return
        self._gone = True
        self.stream.close()
        if within_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)
        self._killed_by_us = self._process.poll() is None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            logger.warning("engine process %d does not end, although it was killed", self.pid)
        os.close(self._life)
        self._reader.join(1.0)

    def _read_lines(self) -> None:
        out = self._process.stdout
        if out is not None:
            with out:
                self._keep(out)

    def _keep(self, out: IO[bytes]) -> None:
        for raw in out:
            line = raw.decode("utf-8", "replace").rstrip()
            self._lines.append(line)
            if line:
                logger.info("engine process %d: %s", self.pid, line)
