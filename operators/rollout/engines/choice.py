"""The engine that a config names. Heavy imports happen here, for the chosen one only."""

from __future__ import annotations

from laminar.operators.operator import Context
from laminar.operators.rollout.config import ScriptedEngineConfig, TorchEngineConfig, VllmEngineConfig
from laminar.operators.rollout.engine import Engine

__all__ = ["build_engine"]


def build_engine(config: TorchEngineConfig | VllmEngineConfig | ScriptedEngineConfig, context: Context) -> Engine:
    """Make it, without weights of a policy version. Raises ConfigError."""
    if isinstance(config, ScriptedEngineConfig):
        from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded

        return ScriptedEngine(
            seeded(
                min_tokens=config.min_tokens,
                max_tokens=config.max_tokens,
                vocab_size=config.vocab_size,
                deadly=config.deadly,
            ),
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            kv_total=config.kv_total,
            tokens_per_s=config.tokens_per_s,
            clock=context.clock,
        )
    model = context.run.model
    if isinstance(config, VllmEngineConfig):
        from laminar.operators.rollout.engines.vllm import VllmEngine

        return VllmEngine(
            model.path,
            dtype=model.dtype,
            max_running=config.max_running,
            kv_total=config.kv_total,
            max_model_len=config.max_model_len,
            threads=config.threads,
            trust_remote_code=model.trust_remote_code,
            steps_per_poll=config.steps_per_poll,
            args=config.args,
            env=config.env,
        )
    import torch

    from laminar.operators.rollout.engines.torch import TorchEngine

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return TorchEngine(
        model.path,
        dtype=model.dtype,
        device=automatic if config.device == "auto" else config.device,
        max_running=config.max_running,
        kv_total=config.kv_total,
        max_model_len=config.max_model_len,
        threads=config.threads,
        trust_remote_code=model.trust_remote_code,
        steps_per_poll=config.steps_per_poll,
    )
