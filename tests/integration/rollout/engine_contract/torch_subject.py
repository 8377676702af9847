"""The torch engine over a tiny random Qwen2 for the contract suite."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from tests.integration.rollout.engine_contract.subject import Subject

PROMPTS = tuple(tuple(range(4 + n, 7 + 2 * n)) for n in range(6))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make(*, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject:
    """Nothing but a request's own stop tokens ends a response, so that all are long."""
    limits = {"max_running": max_running, "max_model_len": max_model_len, "kv_total": kv_total}
    engine = TorchEngine(folder(), **limits, steps_per_poll=2, eos_token_ids=())
    return Subject(engine=engine, prompts=PROMPTS, weights=weights, wrong_weights=wrong_weights())


def wrong_weights() -> Mapping[str, TensorView]:
    """One tensor is missing."""
    wrong = dict(weights(0))
    wrong.pop("model.norm.weight")
    return wrong


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
        hidden_size=32,
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
