"""The engines in processes of their own for the contract suite. They are kept from test to test: a start takes long."""

from __future__ import annotations

import atexit
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from laminar.operators.operator import ModelConfig
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.rollout.engines.text import Decoder, decimal, load_decoder
from tests.integration.rollout.engine_contract.subject import Subject

_SETTINGS = RemoteSettings(ahead=2, gather_s=0.0)
"""It may not run away from a test."""
_idle: dict[str, list[RemoteEngine]] = defaultdict(list)
"""By recipe."""


def scripted(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """See MakeSubject."""
    from tests.integration.rollout.engine_contract import scripted_subject as base

    limits = {"max_running": max_running, "max_model_len": max_model_len, "kv_total": kv_total}
    recipe = Recipe(factory=f"{base.__name__}:engine", options=limits)
    return _subject(recipe, lambda: decimal, prompts=base.PROMPTS, weights=lambda version: {}, wrong_weights={})


def torch(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """See MakeSubject."""
    from tests.integration.rollout.engine_contract import torch_subject as base

    limits = {"max_running": max_running, "max_model_len": max_model_len, "kv_total": kv_total}
    recipe = Recipe(
        factory="laminar.operators.rollout.engines.torch:TorchEngine",
        options={"model_path": str(base.folder()), **limits, "threads": 1, "steps_per_poll": 2, "eos_token_ids": ()},
    )
    return _subject(recipe, _decoder(base), **_of(base))


def vllm(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """See MakeSubject. Only of the usual limits: each others would be a start of ten seconds and more."""
    from tests.integration.rollout.engine_contract import vllm_subject as base

    limits = (max_running, max_model_len, kv_total)
    if limits != (4, 64, 256):
        pytest.skip("vLLM's limits are tested in this process, and what a process changes with other engines")
    recipe = Recipe(
        factory="laminar.operators.rollout.engines.vllm:VllmEngine",
        options={"model_path": str(base.folder()), "threads": 1, **base.options(*limits)},
    )
    return _subject(recipe, _decoder(base), **_of(base))


def _of(base: Any) -> dict[str, Any]:
    return {"prompts": base.PROMPTS, "weights": base.weights, "wrong_weights": base.wrong_weights()}


def _decoder(base: Any) -> Callable[[], Decoder]:
    return lambda: load_decoder(ModelConfig(path=base.folder()))


def _subject(recipe: Recipe, decoder: Callable[[], Decoder], **known: Any) -> Subject:
    idle = _idle[repr(recipe)]
    engine = idle.pop() if idle else _started(recipe, decoder)

    def release() -> None:
        if not engine.ready:
            engine.close()
            return
        for name in list(engine._requests._numbers):
            engine.abort(name)
        idle.append(engine)

    return Subject(engine=engine, release=release, **known)


def _started(recipe: Recipe, decoder: Callable[[], Decoder]) -> RemoteEngine:
    made = RemoteEngine(recipe, decoder=decoder, settings=_SETTINGS)
    atexit.register(made.close)
    return made
