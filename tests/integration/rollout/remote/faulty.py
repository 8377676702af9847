"""Engines with something wrong about them, for processes of their own: ``Recipe(factory="...faulty:NAME")``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError

__all__ = ["IDS", "PROMPT_THAT_IS_REFUSED"]

IDS = tuple(range(1, 61))
"""What is answered to every request."""
PROMPT_THAT_IS_REFUSED = 666


def _script(request: EngineRequest) -> Answer:
    refused = "scripted refusal" if PROMPT_THAT_IS_REFUSED in request.prompt_ids else None
    return Answer(ids=IDS, reject=refused)


def counting(*, tokens_per_poll: int = 1) -> ScriptedEngine:
    """Nothing wrong: the same 60 tokens for every request."""
    return ScriptedEngine(_script, tokens_per_poll=tokens_per_poll)


class Sleepy(ScriptedEngine):
    """Hangs in the poll after the one with the fifth token."""

    def poll(self, timeout_s: float) -> list[Delta]:
        """See Engine.poll."""
        if any(sequence.sampled >= 5 for sequence in self._running.values()):
            time.sleep(3600)
        return super().poll(timeout_s)


def sleepy() -> ScriptedEngine:
    """See Sleepy."""
    return Sleepy(_script)


class WeightsFall(ScriptedEngine):
    """Its process is killed while it loads any version above 0."""

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """See Engine.load."""
        if version:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load(weights, version)


def weights_fall() -> ScriptedEngine:
    """See WeightsFall."""
    return WeightsFall(_script)


class _AsleepInLoad(ScriptedEngine):
    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        if version:
            time.sleep(3600)
        super().load(weights, version)


def asleep_in_load() -> ScriptedEngine:
    """Hangs while it loads any version above 0."""
    return _AsleepInLoad(_script)


class _Reads(ScriptedEngine):
    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        said = {name: (view.dtype, view.shape, bytes(view.data)) for name, view in sorted(weights.items())}
        sys.stderr.write(f"weights {said}\n")
        super().load(weights, version)


def reads() -> ScriptedEngine:
    """Writes every byte of its weights to stderr."""
    return _Reads(_script)


def ends(*, how: str) -> ScriptedEngine:
    """Does not start."""
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            raise MemoryError
        case "config":
            raise ConfigError("engine.kind: nothing is right (valid: something)")
        case "slow":
            time.sleep(3600)
        case "bug":
            raise ZeroDivisionError("a fault in the engine")
    raise AssertionError(how)


def ends_with(*, how: str, model_path: str, kv_total: int, max_running: int) -> ScriptedEngine:
    """The same, with the options of a model's engine."""
    del model_path, kv_total, max_running
    return ends(how=how)


def breaks() -> ScriptedEngine:
    """Out of service at the fourth token."""
    return ScriptedEngine(lambda request: Answer(ids=IDS, crash_at=4))


def second_fails(*, marker: str) -> ScriptedEngine:
    """Starts once only."""
    path = Path(marker)
    if path.exists():
        with path.open("a") as out:
            out.write(f"{time.monotonic()}\n")
        raise ConfigError("engine: only once")
    path.touch()
    return counting()


def with_worker(*, marker: str) -> ScriptedEngine:
    """Has a process of its own, as vLLM's workers are, which would live for ever; its pid stands in ``marker``."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(marker).write_text(f"{os.getpid()} {worker.pid}")
    return counting()


def long_words() -> ScriptedEngine:
    """Ends its process with the first token, after a word on stderr."""

    class _Words(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[Delta]:
            sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
            os._exit(7)

    return _Words(_script)
