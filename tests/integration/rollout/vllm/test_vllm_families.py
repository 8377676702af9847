"""Families of models under their own names: what the trainer publishes is what vLLM serves (case D12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.trainer.publish import named_tensors, tied_names
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas.errors import WeightsMismatch
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import Tokens
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import LETTERS, SHAPE

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

Start = Callable[..., "VllmEngine"]

EXPERTS: dict[str, Any] = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LEARNED: dict[str, Any] = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=32),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
    "gpt2": lambda: transformers.GPT2Config(
        **LEARNED, n_embd=64, n_layer=2, n_head=2, n_positions=512, initializer_range=0.3
    ),
    "opt": lambda: transformers.OPTConfig(
        **LEARNED, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, init_std=0.3,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, head_dim=32),
}  # fmt: skip


def _published(model: Any) -> dict[str, TensorView]:
    """What the trainer publishes: its own function."""
    named = named_tensors(model, torch.float32, tied_names(model))
    return {t.name: TensorView(dtype=t.dtype, shape=t.shape, data=t.data) for t in named}


def _sampled(engine: VllmEngine) -> Tokens:
    request = EngineRequest(
        trajectory_id="t", prompt_ids=(4, 5, 6), sampling=Sampling(max_tokens=40, temperature=1.0), seed=3
    )
    engine.submit(request)
    drive = Drive(engine)
    drive.until_finished(["t"])
    return drive.tokens("t")


def _worst(model: Any, response: Tokens) -> float:
    ids = torch.tensor([[4, 5, 6, *response.ids_T.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, 2:-1].float(), dim=-1)
    expected = logprobs.gather(1, ids[0, 3:, None])[:, 0].numpy()
    return float(np.abs(expected - response.logprobs_T).max())


@pytest.fixture(params=FAMILIES)
def family(
    request: pytest.FixtureRequest, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[VllmEngine, list[Any]]]:
    """An engine, and two policies of its family as the trainer has them."""
    from vllm.model_executor.models import registry

    # A family that was never served here is looked at in a process that imports vLLM, which this one has done.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    symbol_tokenizer(list(LETTERS), separator="", max_length=512).save_pretrained(tmp_path)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM
    policies = [loaded.from_pretrained(tmp_path, dtype=torch.float32).eval() for _ in range(2)]
    with torch.no_grad():
        for i, tensor in enumerate(policies[1].parameters()):
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    engine = start(path=tmp_path)
    yield engine, policies
    engine.close()


def test_d12_d14_a_family_is_served_as_the_trainer_has_it_and_a_wrong_set_of_names_changes_nothing(
    family: tuple[VllmEngine, list[Any]],
) -> None:
    engine, policies = family
    engine.load(_published(policies[0]), 0)
    assert _worst(policies[0], _sampled(engine)) < 1e-4
    engine.load(_published(policies[1]), 1)
    before = _sampled(engine)
    assert _worst(policies[1], before) < 1e-4
    assert _worst(policies[0], before) > 1e-3
    whole = _published(policies[0])
    first = next(name for name in sorted(whole)[len(whole) // 2 :] if name.endswith(".weight"))
    for wrong, message in (
        ({name: view for name, view in whole.items() if name != first}, rf"weights: {first} missing"),
        ({f"base_model.{name}": view for name, view in whole.items()}, r"base_model\..* not in the model"),
        ({**whole, first.replace(".weight", ".lora_A.weight"): whole[first]}, r"lora_A\S* not in the model"),
    ):
        with pytest.raises(WeightsMismatch, match=message):
            engine.load(wrong, 2)
    assert engine.version == 1
    assert _sampled(engine) == before
