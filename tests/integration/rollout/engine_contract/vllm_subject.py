"""vLLM over a tiny random Qwen2 for the contract suite. Engines are kept from test to test: the first takes long."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.rollout.engines.vllm import VllmEngine
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from tests.integration.rollout.engine_contract.subject import Subject

PROMPTS = tuple(tuple(range(4 + n, 7 + 2 * n)) for n in range(6))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_BLOCK = 32
_idle: dict[tuple[int, int, int], list[VllmEngine]] = defaultdict(list)
"""By limits."""


def make(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """Nothing but a request's own stop tokens ends a response, so that all are long."""
    limits = (max_running, max_model_len, kv_total)
    engine = _idle[limits].pop() if _idle[limits] else _engine(*limits)

    def release() -> None:
        for name in list(engine._rows):
            engine.abort(name)
        _idle[limits].append(engine)

    return Subject(engine=engine, prompts=PROMPTS, weights=weights, wrong_weights=wrong_weights(), release=release)


def wrong_weights() -> Mapping[str, TensorView]:
    """One tensor is missing."""
    wrong = dict(weights(0))
    wrong.pop("model.layers.1.self_attn.k_proj.weight")
    return wrong


def options(max_running: int, max_model_len: int, kv_total: int) -> dict[str, Any]:
    """Of an engine with these limits, but for its folder."""
    return {
        "max_running": max_running,
        "max_model_len": min(max_model_len, kv_total // _BLOCK * _BLOCK),
        "kv_total": kv_total,
        "steps_per_poll": 2,
        "eos_token_ids": (),
        "args": {"enforce_eager": True, "block_size": _BLOCK, "kv_cache_memory_bytes": 64 << 20},
    }


def _engine(max_running: int, max_model_len: int, kv_total: int) -> VllmEngine:
    made = VllmEngine(folder(), **options(max_running, max_model_len, kv_total))
    atexit.register(made.close)
    return made


@cache
def folder() -> Path:
    """The model's."""
    path = Path(tempfile.mkdtemp(prefix="laminar-contract-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    tokenizer = symbol_tokenizer(list(_LETTERS), separator="", max_length=64)
    tokenizer.save_pretrained(path)
    _model(0).save_pretrained(path)
    return path


@cache
def _model(version: int) -> Qwen2ForCausalLM:
    torch.manual_seed(version)
    config = Qwen2Config(
        vocab_size=4 + len(_LETTERS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


@cache
def weights(version: int) -> Mapping[str, TensorView]:
    """Of a version: without a file, as from a test."""
    state = _model(version).state_dict()
    state.pop("lm_head.weight")
    return {
        name: TensorView(dtype="F32", shape=tuple(tensor.shape), data=memoryview(tensor.numpy().tobytes()))
        for name, tensor in state.items()
    }
