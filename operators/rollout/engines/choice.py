"""The engine that a config names. Heavy imports happen here, for the chosen one only."""

from __future__ import annotations

from laminar.operators.operator import Context
from laminar.operators.rollout.config import ScriptedEngineConfig, TorchEngineConfig
from laminar.operators.rollout.engine import Engine

__all__ = ["build_engine"]


def build_engine(config: TorchEngineConfig | ScriptedEngineConfig, context: Context) -> Engine:
    """Make it, without weights of a policy version. Raises ConfigError."""
    if isinstance(config, ScriptedEngineConfig):
        from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded

        return ScriptedEngine(
            seeded(min_tokens=config.min_tokens, max_tokens=config.max_tokens, vocab_size=config.vocab_size),
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            kv_total=config.kv_total,
            tokens_per_s=config.tokens_per_s,
            clock=context.clock,
        )
    from laminar.operators.rollout.engines.torch import TorchEngine

    return TorchEngine(config, context.run.model)
