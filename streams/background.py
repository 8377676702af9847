"""Work that goes on beside a step: one call at a time on a thread that stays for the next one.

A rollout makes tens of transactions a second beside its engine. A new thread for each would make the step wait until it
has started, and would disturb the engine's memory each time it comes and goes.

>>> call = in_background(lambda: None)
>>> call.wait(10.0), call.done()
(True, True)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

__all__ = ["Background", "Call", "in_background"]

_IDLE_S = 10.0
"""A thread that has had nothing to do for so long ends."""


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

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by result
            self._error = error

    def end(self) -> None:
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


class _Thread:
    """Makes one call after the other, and rests in ``_idle`` between two."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_OnThread] = SimpleQueue()
        threading.Thread(target=self._run, name="background", daemon=True).start()

    def make(self, call: _OnThread) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    continue  # it was taken for a call this very moment
                return
            call.run()
            _idle.append(self)  # before anybody can know of the end: the next call finds it
            call.end()
            del call


_idle: list[_Thread] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not go along


def in_background(call: Callable[[], None]) -> Call:
    """Begin the call. Its thread does not keep the process from ending."""
    made = _OnThread(call)
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.make(made)
    return made
