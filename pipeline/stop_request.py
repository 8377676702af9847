"""How a process is asked to stop: by SIGTERM or SIGINT.

The first signal asks to drain: the step in hand is finished, then what the operator has in hand, within the deadline.
The second one leaves at once, even out of a step that hangs: it raises in the main thread, whatever is open is aborted
and closed. The third does not even close.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from laminar.pipeline.exit_code import RETRYABLE

__all__ = ["LeaveAtOnce", "StopRequest", "StoppedBeforeReady"]

_SIGNALS_TO_LEAVE = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedBeforeReady(BaseException):
    """A signal came while the operator was still being built: there is nothing to drain."""


class LeaveAtOnce(BaseException):
    """A second signal came."""


class StopRequest:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.signals = 0
        self.reason = ""
        """Who asked first; empty: nobody."""
        self.building = False
        """Nothing is in hand yet: a signal ends the process without waiting for slow imports and model files."""
        self._interrupts = False

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """From here on the process only ends: a late signal must not turn a clean exit into a killed one."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, the second signal raises LeaveAtOnce."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.request(signal.Signals(number).name)
        if self.building:
            self.building = False
            raise StoppedBeforeReady
        if self.signals > _SIGNALS_TO_LEAVE:
            os._exit(RETRYABLE)
        if self.signals == _SIGNALS_TO_LEAVE and self._interrupts:
            self._interrupts = False
            raise LeaveAtOnce

    def request(self, reason: str) -> None:
        """Ask to stop."""
        self.signals += 1
        self.reason = self.reason or reason
