"""Starts the process of an engine, ends it, and starts the next one, ever later.

>>> supervisor = Supervisor(recipe, RemoteSettings())                          # doctest: +SKIP
>>> facts = supervisor.first(meanwhile=load_tokenizer)                         # doctest: +SKIP
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laminar.operators.rollout.engine import EngineLimits
from laminar.operators.rollout.engines.memory import is_shortage, shortage
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.health import Pause
from laminar.operators.rollout.engines.remote.process import EngineProcess
from laminar.operators.rollout.engines.remote.wire import command, unpack
from laminar.schemas import errors
from laminar.schemas.errors import LaminarError, Unavailable
from laminar.streams.deadline import Deadline

__all__ = ["Facts", "RemoteSettings", "Supervisor"]

_CLOSE_S = 3.0
_LOOK_S = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """How an engine's process is looked after. The first ones as in ``laminar.operators.rollout.config``."""

    start_timeout_s: float = 600.0
    hung_after_s: float = 60.0
    load_hung_after_s: float = 300.0
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    start_attempts: int = 5
    stable_s: float = 60.0
    """One that lived for so long begins again with the shortest back-off."""
    ahead: int = 64
    """Reports that may be unread before the process stops decoding."""
    gather_s: float = 0.2
    """Tokens wait so long for more of them, unless one is the last of its request: each report costs the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine says of itself once it is there."""

    name: str
    limits: EngineLimits
    vocab_size: int | None


class Supervisor:
    """See the module's docstring. Never waits, but in ``first`` and ``close``."""

    def __init__(self, recipe: Recipe, settings: RemoteSettings) -> None:
        self._recipe = recipe
        self._settings = settings
        self.process: EngineProcess | None = None
        """The one that runs or starts."""
        self._ready_at: float | None = None
        self._deadline = Deadline.after(0.0, "start of the engine's process")
        self._pause = Pause(first_s=settings.restart_backoff_s, longest_s=settings.restart_backoff_max_s)
        self._next_at = 0.0
        self._failures = 0
        self._gave_up: str | None = None

    def begin(self) -> None:
        """Start a process, which is not ready yet."""
        self._ready_at = None
        self.process = EngineProcess(self._recipe.environment)
        self._deadline = Deadline.after(self._settings.start_timeout_s, "start of the engine's process")
        self.process.stream.send(
            command(
                "start",
                factory=self._recipe.factory,
                options=dict(self._recipe.options),
                ahead=self._settings.ahead,
                gather_s=self._settings.gather_s,
            )
        )

    def first(self) -> Facts:
        """Wait until the process that was begun is ready. Raises what is wrong with it."""
        while (facts := self._look()) is None:
            assert self.process is not None
            self.process.stream.wait(_LOOK_S)
        return facts

    def again(self) -> Facts | None:
        """A step towards a new process; its facts once it is ready. Raises Unavailable when it gives up."""
        if self._gave_up is not None:
            raise Unavailable(self._gave_up)
        if self.process is None:
            if time.monotonic() >= self._next_at:
                self.begin()
            return None
        try:
            facts = self._look()
        except LaminarError as error:
            self._failures += 1
            if self._failures >= self._settings.start_attempts:
                self._gave_up = f"engine: failed to start {self._failures} times in a row: {error}"
                raise Unavailable(self._gave_up) from error
            wait_s = self._schedule()
            logger.warning("engine: starting again in %.1f s: %s", wait_s, error)
            return None
        if facts is not None:
            self._failures = 0
            logger.info("engine %s: started anew", facts.name)
        return facts

    def end(self) -> None:
        """Kill the process; ``again`` starts the next one."""
        self._kill()
        if self._ready_at is not None and time.monotonic() - self._ready_at >= self._settings.stable_s:
            self._pause.reset()
        self._schedule()

    def close(self) -> None:
        """Let the process end, or kill it."""
        if self.process is not None:
            self.process.end(_CLOSE_S if self._ready_at is not None else 0.0)
            self.process = None

    def _look(self) -> Facts | None:
        """The facts, if it is ready by now. Raises what is wrong with it; it is gone then."""
        process = self.process
        assert process is not None
        for message in process.stream.receive():
            answer = unpack(message).answer
            if "ready" in answer:
                self._ready_at = time.monotonic()
                return _facts(answer["ready"])
            if "failed" in answer:
                self._kill()
                why = answer["failed"]
                if is_shortage(process.output) and not is_shortage(why):  # a worker's word, which vLLM does not repeat
                    why += f"; not enough memory: {shortage(self._recipe.options)}"
                raise getattr(errors, answer["kind"])(why)
        if process.stream.closed or not process.runs:
            process.settle()
            self._kill()
            why = f"engine: its process {process.describe_end()}, before it was ready"
            if process.killed:
                why += f"; as the kernel does when memory is short: {shortage(self._recipe.options)}"
            elif is_shortage(process.output):
                why += f"; not enough memory: {shortage(self._recipe.options)}"
            raise Unavailable(why)
        if self._deadline.passed:
            process.interrogate()
            self._kill()
            raise self._deadline.exceeded(f"killed (pid {process.pid}): {process.last_words()}")
        return None

    def _kill(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None

    def _schedule(self) -> float:
        wait_s = self._pause.next()
        self._next_at = time.monotonic() + wait_s
        return wait_s


def _facts(said: Mapping[str, Any]) -> Facts:
    limits = EngineLimits(
        max_running=said["max_running"], max_model_len=said["max_model_len"], kv_total=said["kv_total"]
    )
    return Facts(name=said["name"], limits=limits, vocab_size=said["vocab_size"])
