"""The engine that a config names, in this process or in its own. Heavy imports happen for the chosen one only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from laminar.operators.operator import Context, ModelConfig
from laminar.operators.rollout.config import ScriptedEngineConfig, TorchEngineConfig, VllmEngineConfig
from laminar.operators.rollout.engine import Engine
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded
from laminar.operators.rollout.engines.text import Decoder, decimal, load_decoder

__all__ = ["build_engine", "recipe_of", "scripted"]

_SETTINGS = (
    "start_timeout_s", "hung_after_s", "load_hung_after_s", "restart_backoff_s", "restart_backoff_max_s",
    "start_attempts",
)  # fmt: skip


def build_engine(config: TorchEngineConfig | VllmEngineConfig | ScriptedEngineConfig, context: Context) -> Engine:
    """Make it, without weights of a policy version. Raises ConfigError."""
    model = context.run.model
    recipe = recipe_of(config, model)
    if config.process == "own":

        def decoder() -> Decoder:
            return decimal if isinstance(config, ScriptedEngineConfig) else load_decoder(model)

        settings = RemoteSettings(**{name: getattr(config, name) for name in _SETTINGS})
        return RemoteEngine(recipe, decoder=decoder, settings=settings)
    if isinstance(config, ScriptedEngineConfig):
        return scripted(**recipe.options, clock=context.clock)
    return recipe.build()


def recipe_of(config: TorchEngineConfig | VllmEngineConfig | ScriptedEngineConfig, model: ModelConfig) -> Recipe:
    """How to make it, here or elsewhere."""
    if isinstance(config, ScriptedEngineConfig):
        names = (
            "min_tokens", "max_tokens", "vocab_size", "deadly", "max_running", "max_model_len", "kv_total",
            "tokens_per_s",
        )  # fmt: skip
        return Recipe(
            factory=f"{__name__}:{scripted.__name__}", options={name: getattr(config, name) for name in names}
        )
    options: dict[str, Any] = {
        "model_path": str(model.path),
        "dtype": model.dtype,
        "max_running": config.max_running,
        "kv_total": config.kv_total,
        "max_model_len": config.max_model_len,
        "threads": config.threads,
        "trust_remote_code": model.trust_remote_code,
        "steps_per_poll": config.steps_per_poll,
    }
    if isinstance(config, VllmEngineConfig):
        return Recipe(
            factory="laminar.operators.rollout.engines.vllm:VllmEngine",
            options={**options, "args": dict(config.args), "env": dict(config.env)},
        )
    return Recipe(
        factory="laminar.operators.rollout.engines.torch:TorchEngine", options={**options, "device": config.device}
    )


def scripted(
    *,
    min_tokens: int = 4,
    max_tokens: int = 32,
    vocab_size: int = 256,
    deadly: Sequence[str] = (),
    max_running: int = 64,
    max_model_len: int = 4096,
    kv_total: int = 65536,
    tokens_per_s: float = 1000.0,
    clock: Callable[[], float] = time.time,
) -> ScriptedEngine:
    """The engine of ``kind: scripted``; see the fields of its config."""
    return ScriptedEngine(
        seeded(min_tokens=min_tokens, max_tokens=max_tokens, vocab_size=vocab_size, deadly=deadly),
        max_running=max_running,
        max_model_len=max_model_len,
        kv_total=kv_total,
        tokens_per_s=tokens_per_s,
        clock=clock,
    )
