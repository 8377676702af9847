"""``recompute``: less is kept of a forward pass, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.policy import Policy
from laminar.operators.trainer.selection import Batch, Sample
from laminar.schemas.errors import ConfigError
from tests.support.dataflow import make_prompt
from tests.support.training import scored


def _model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.5,
    )
    return LlamaForCausalLM(config)


def _trained(*, recompute: bool) -> tuple[Any, int, int]:
    """The model after a backward pass, how often a layer was computed, and how many bytes the graph held."""
    model, calls, held = _model(), 0, 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += tensor.nbytes
        return tensor

    model.model.layers[1].mlp.register_forward_pre_hook(count)
    policy = Policy(model, TrainerConfig(device="cpu", recompute=recompute), total_steps=1)
    samples = tuple(
        Sample(trajectory=scored(make_prompt(i), n=20).trajectory, advantage=1.0 - 2 * (i % 2)) for i in range(4)
    )
    policy.begin(Batch(samples=samples, dropped=(), denominator=80, n_tokens=80, staleness={}, metrics={}), 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.advance()
    return model, calls, held


def test_recompute_gives_the_same_gradients_from_layers_that_are_computed_twice() -> None:
    plain, once, held = _trained(recompute=False)
    again, twice, less = _trained(recompute=True)
    assert (once, twice) == (1, 2)
    assert less < held
    for (name, parameter), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=0, msg=name)


def test_a_model_that_cannot_is_refused() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"trainer.recompute: Linear cannot \(set it to false\)"):
        Policy(model, TrainerConfig(device="cpu", recompute=True), total_steps=1)
