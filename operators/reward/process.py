"""A process that runs one reward function: imports it once, then scores what it is sent, one at a time.

Started by ``pool.py`` with its end of a connection as the only argument. It has the user's code, and nothing of the
log; it may hang, crash or be killed at any time. It ends when the other end of its connection closes, and on Linux the
kernel kills it with its parent, even inside an expression that never returns.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from multiprocessing.connection import Connection
from typing import Any

from laminar.operators.reward.functions import Score, score_of
from laminar.schemas.records import CompletedTrajectory

__all__ = ["Answer", "Broken", "Ready", "Setup", "load", "main"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to the process."""

    function: str
    """``module:function``."""
    options: Mapping[str, Any]
    parent: int


@dataclass(frozen=True, slots=True)
class Ready:
    """First message from the process: the function is there."""


@dataclass(frozen=True, slots=True)
class Broken:
    """First message from the process: the function cannot be had."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome for one trajectory."""

    score: Score
    latency_ms: float
    may_retry: bool = False
    """Whether another call might succeed."""


def load(function: str, options: Mapping[str, Any]) -> Callable[[CompletedTrajectory], object]:
    """Import ``module:function`` (the working directory is searched first) and bind its options.

    Raises whatever the import raises; TypeError when the options do not fit.
    """
    module_name, _, path = function.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = reduce(getattr, path.split("."), importlib.import_module(module_name))
    if not callable(found):
        raise TypeError(f"{function} is {type(found).__name__}, not callable")
    try:
        signature = inspect.signature(found)
    except ValueError:  # a builtin without one
        return partial(found, **options)
    signature.bind(None, **options)
    return partial(found, **options)


def main() -> None:
    """Serve until the connection closes."""
    with Connection(int(sys.argv[1])) as connection:
        setup: Setup = connection.recv()
        _die_with(setup.parent)
        try:
            function = load(setup.function, setup.options)
        except Exception as error:  # noqa: BLE001 - the user's module may raise anything; it is reported
            connection.send(Broken(f"{type(error).__name__}: {error}"))
            return
        connection.send(Ready())
        while True:
            try:
                trajectory: CompletedTrajectory = connection.recv()
            except EOFError:
                return
            connection.send(_score(function, trajectory))


def _score(function: Callable[[CompletedTrajectory], object], trajectory: CompletedTrajectory) -> Answer:
    start = time.perf_counter()
    try:
        score, raised = score_of(function(trajectory)), False
    except Exception as error:  # noqa: BLE001 - what the user's function raises is a failure, not a reward
        score, raised = Score(reward=None, failure=f"{type(error).__name__}: {error}"), True
    return Answer(score, (time.perf_counter() - start) * 1e3, may_retry=raised)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
