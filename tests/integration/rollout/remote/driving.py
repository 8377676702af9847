"""Engines in processes of their own, driven by tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.rollout.engines.text import decimal
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import EMPTY, Tokens
from tests.integration.rollout.remote import faulty

__all__ = ["again", "alive", "asked", "lost", "made", "recipe_of", "so_far", "until"]

_PATIENCE_S = 240.0


def recipe_of(name: str, **options: Any) -> Recipe:
    """Of ``faulty``."""
    return Recipe(factory=f"{faulty.__name__}:{name}", options=options)


def made(name: str, settings: RemoteSettings | None = None, **options: Any) -> RemoteEngine:
    """An engine of ``faulty``, with version 0."""
    engine = RemoteEngine(recipe_of(name, **options), decoder=lambda: decimal, settings=settings)
    engine.load({}, 0)
    return engine


def asked(name: str, *, sampled: Tokens = EMPTY, prompt: tuple[int, ...] = (1, 2, 3)) -> EngineRequest:
    """A request."""
    return EngineRequest(
        trajectory_id=name, prompt_ids=prompt, sampled=sampled, sampling=Sampling(max_tokens=100), seed=1
    )


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < _PATIENCE_S, f"{what}: not within {_PATIENCE_S:g} s"
        time.sleep(0.01)


def so_far(engine: RemoteEngine, n: int) -> list[Delta]:
    """Poll until at least ``n`` tokens have come."""
    deltas: list[Delta] = []

    def enough() -> bool:
        deltas.extend(engine.poll(0.01))
        return sum(delta.tokens.n_tokens for delta in deltas) >= n

    until(enough, f"{n} tokens")
    return deltas


def lost(engine: RemoteEngine, deltas: list[Delta]) -> Exception:
    """Poll until it raises; what came before goes to ``deltas``."""
    began = time.monotonic()
    while time.monotonic() - began < _PATIENCE_S:
        try:
            deltas += engine.poll(0.01)
        except Exception as error:  # noqa: BLE001 - the test says which it must be
            return error
    raise AssertionError("it is not lost")


def again(engine: RemoteEngine) -> None:
    """Poll until it has started anew."""

    def started() -> bool:
        assert engine.poll(0.0) == []
        return engine.ready

    until(started, "a new start")


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
