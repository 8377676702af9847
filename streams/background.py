"""Work that goes on beside a step: one call on a thread of its own.

>>> call = in_background(lambda: None)
>>> call.wait(10.0), call.done()
(True, True)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Background", "Call", "in_background"]


class Call(Protocol):
    """A call that was begun."""

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""

    def result(self) -> None:
        """Once it has ended: raise what it raised."""


Background = Callable[[Callable[[], None]], Call]
"""Begins a call."""


class _OnThread:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="background", daemon=True).start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by result
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def result(self) -> None:
        if not self._ended.is_set():
            raise AssertionError("the call has not ended")
        if self._error is not None:
            raise self._error


def in_background(call: Callable[[], None]) -> Call:
    """Begin the call. Its thread does not keep the process from ending."""
    return _OnThread(call)
