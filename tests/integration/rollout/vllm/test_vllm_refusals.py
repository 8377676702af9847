"""What vLLM cannot do, and weights that are not the model's: one line each, and nothing changed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.vllm_worker import Piece, mapped, take
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, InvalidRequest, Unavailable, WeightsMismatch
from laminar.schemas.records import Sampling
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import ARGS, LETTERS, SHAPE, Policy, changed, symbol_tokenizer, views

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"

Start = Callable[..., "VllmEngine"]


def _greedy(engine: VllmEngine, n: int = 12) -> bytes:
    request = EngineRequest(
        trajectory_id="probe", prompt_ids=(4, 5, 6), sampling=Sampling(max_tokens=n, temperature=0.0), seed=0
    )
    engine.submit(request)
    drive = Drive(engine)
    drive.until_finished(["probe"])
    return drive.tokens("probe").ids + drive.tokens("probe").logprobs


def _folder(path: Path, **shape: Any) -> Path:
    symbol_tokenizer(list(LETTERS), separator="", max_length=512).save_pretrained(path)
    Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **shape})).save_pretrained(path)
    return path


def _nan(weights: dict[str, TensorView]) -> dict[str, TensorView]:
    values = np.zeros(weights[GATE].shape, dtype=np.float32)
    values[3, 5] = np.nan
    return changed(weights, GATE, values)


def _other_dtype(weights: dict[str, TensorView]) -> dict[str, TensorView]:
    half = weights[GATE]
    return {**weights, GATE: TensorView(dtype="BF16", shape=half.shape, data=half.data[: half.data.nbytes // 2])}


WRONG: dict[str, tuple[Callable[[dict[str, TensorView]], dict[str, TensorView]], str]] = {
    "d11 a missing tensor": (lambda w: {k: v for k, v in w.items() if k != K_PROJ}, f"{K_PROJ} missing"),
    "d12 a fused name": (lambda w: {**w, "model.layers.0.self_attn.qkv_proj.weight": w[K_PROJ]}, "qkv_proj.*not in"),
    "another shape": (lambda w: changed(w, GATE, np.zeros((64, 64))), r"shape \[64, 64\], the model has \[128, 64\]"),
    "another dtype": (_other_dtype, "dtype BF16, the model has F32"),
    "too few bytes": (
        lambda w: {**w, GATE: TensorView(dtype="F32", shape=w[GATE].shape, data=w[GATE].data[:8])},
        "8 bytes",
    ),
    "nan": (_nan, f"{GATE}: not all of its 8192 values are finite"),
    "another model": (
        lambda w: views(Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "num_hidden_layers": 3}))),
        r"model\.layers\.2.*more are not in the model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_are_not_the_models_are_refused_before_a_byte_is_written(
    engine: VllmEngine, policy: Policy, case: str
) -> None:
    change, message = WRONG[case]
    before = _greedy(engine)
    with pytest.raises(WeightsMismatch, match=message) as caught:
        engine.load(change(policy.weights(1)), 1)
    assert "\n" not in str(caught.value)
    assert engine.version == 0
    assert _greedy(engine) == before


def test_d11_the_tied_output_layer_may_be_there_or_not(engine: VllmEngine, policy: Policy) -> None:
    engine.load(policy.weights(3), 3)
    without = _greedy(engine)
    engine.load(policy.weights(0), 4)
    engine.load(views(policy.model(3), tied=False), 5)
    assert _greedy(engine) == without


def test_d11_an_output_layer_of_its_own_must_come(start: Start, tmp_path: Path) -> None:
    policy = Policy(tmp_path, tied=False)
    policy.save()
    engine = start(path=tmp_path)
    weights = policy.weights(1)
    engine.load(weights, 1)
    del weights["lm_head.weight"]
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight missing"):
        engine.load(weights, 2)


def _breaking(worker: Any, pieces: Sequence[Piece]) -> int:
    """A reload that ends in the middle."""

    def some(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for i, pair in enumerate(tensors):
            if i == 7:
                raise RuntimeError("the mapping went away")
            yield pair

    with mapped(pieces) as tensors:
        return take(worker, some(tensors))


def test_a_load_that_fails_half_way_takes_the_engine_out_of_service(start: Start, policy: Policy) -> None:
    engine = start()
    engine.load(policy.weights(0), 0)
    request = EngineRequest(trajectory_id="t", prompt_ids=(4, 5), sampling=Sampling(max_tokens=9), seed=0)
    engine.submit(request)
    engine.poll(0.0)
    engine._reload = _breaking
    with pytest.raises(Unavailable, match="while it loaded version 1: the mapping went away"):
        engine.load(policy.weights(1), 1)
    for call in (lambda: engine.poll(0.0), lambda: engine.submit(request), lambda: engine.load(policy.weights(2), 2)):
        with pytest.raises(Unavailable, match="out of service while it loaded version 1"):
            call()
    rest = engine.abort("t")
    assert rest is not None
    assert engine.abort("t") is None


def test_bf16_weights_that_are_loaded_are_those_of_an_engine_that_starts_with_them(
    start: Start, tmp_path: Path
) -> None:
    models = [Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16) for _ in range(2)]
    for name, model in zip(("old", "new"), models, strict=True):
        model.save_pretrained(tmp_path / name)
        symbol_tokenizer(list(LETTERS), separator="", max_length=512).save_pretrained(tmp_path / name)
    new = {
        name: TensorView(
            dtype="BF16",
            shape=tuple(tensor.shape),
            data=memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in models[1].state_dict().items()
    }
    changed_one, fresh = (start(path=tmp_path / name, dtype="bfloat16") for name in ("old", "new"))
    changed_one.load(new, 1)
    fresh._version = 1
    assert _greedy(changed_one, 60) == _greedy(fresh, 60)


def test_memory_is_flat_over_100_loads(engine: VllmEngine, policy: Policy) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for i in range(20):
        engine.load(policy.weights(i % 2), i)
    before = resident()
    for i in range(20, 120):
        engine.load(policy.weights(i % 2), i)
    size = sum(view.data.nbytes for view in policy.weights(0).values())
    assert resident() - before < 10 * size


def test_a_head_size_without_a_kernel_is_named_at_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"head size 16") as caught:
        start(path=_folder(tmp_path, num_attention_heads=4))
    assert "\n" not in str(caught.value)
    assert "Qwen2ForCausalLM" in str(caught.value)


def test_an_unknown_architecture_is_named_at_start(start: Start, tmp_path: Path) -> None:
    config = _folder(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Perceptron1958"]}))
    with pytest.raises(ConfigError, match="Perceptron1958") as caught:
        start(path=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kv_total": 200}, r"engine.kv_total: 200 tokens are 6 blocks of 32.*max_model_len=256.*valid: 256 and more"),
        ({"kv_total": 20, "max_model_len": None}, r"engine.kv_total: 20 tokens are 0 blocks of 32"),
        ({"max_model_len": 4096}, "4096"),
        ({"args": {**ARGS, "block_size": "many"}}, "block_size"),
        ({"args": {**ARGS, "enforce_eagr": True}}, r"engine.args: enforce_eagr: .*closest: enforce_eager"),
        ({"args": {**ARGS, "tensor_parallel_size": 4}}, r"attention heads \(2\) must be divisible by .* size \(4\)"),
        (
            {"args": {**ARGS, "kv_cache_memory_bytes": 40000}, "kv_total": None},
            r"max_model_len=256 needs [\d.]+ GiB.*valid: engine.max_model_len up to 32, or a larger args.kv_cache",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_cannot_be_are_one_line(start: Start, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(**how)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a4_a_prompt_above_max_model_len_is_refused_and_others_go_on(engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"300 prompt tokens .*max_model_len is 256"):
        engine.submit(EngineRequest(trajectory_id="t", prompt_ids=(4,) * 300, sampling=Sampling(max_tokens=9), seed=0))
    assert _greedy(engine)


def test_e4_a_temperature_that_vllm_does_not_have_is_refused_with_what_it_has(engine: VllmEngine) -> None:
    hot = Sampling(max_tokens=9, temperature=3.0)
    with pytest.raises(InvalidRequest, match=r"t: temperature must be in \[0, 2\]"):
        engine.submit(EngineRequest(trajectory_id="t", prompt_ids=(4,), sampling=hot, seed=0))
    assert engine.abort("t") is None


def test_the_cache_is_what_max_model_len_follows_when_only_it_is_given(start: Start) -> None:
    engine = start(kv_total=100, max_model_len=None)
    assert (engine.limits.kv_total, engine.limits.max_model_len) == (96, 96)


def test_d1_a_nan_logprob_is_an_error_of_its_trajectory(start: Start, policy: Policy) -> None:
    from laminar.operators.rollout.engines.vllm_row import Row

    request = EngineRequest(trajectory_id="t", prompt_ids=(4,), sampling=Sampling(max_tokens=9), seed=0)
    for bad in (float("nan"), float("-inf"), 0.5):
        row = Row(request, name="t", limit=9, stops=frozenset(), decode=lambda ids: "")
        row.add(5, -0.1, 3)
        row.add(6, bad, 3)
        delta = row.take()
        assert delta is not None
        assert (delta.tokens.n_tokens, delta.finish, delta.error) == (1, None, f"logprob {bad} at token 1")
