"""The scripted engine for the contract suite."""

from __future__ import annotations

from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded
from tests.integration.rollout.engine_contract.subject import Subject

PROMPTS = tuple(tuple(range(300, 303 + n)) for n in range(6))


def make(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """Answers of 40 tokens, two a poll."""
    made = engine(max_running=max_running, max_model_len=max_model_len, kv_total=kv_total)
    return Subject(engine=made, prompts=PROMPTS, weights=lambda version: {}, wrong_weights={})


def engine(*, max_running: int, max_model_len: int, kv_total: int) -> ScriptedEngine:
    """With these limits."""
    return ScriptedEngine(
        seeded(min_tokens=40, max_tokens=40),
        max_running=max_running,
        max_model_len=max_model_len,
        kv_total=kv_total,
        tokens_per_poll=2,
        refuse_versions=frozenset({99}),
    )
