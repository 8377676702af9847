"""Loading weights into a module in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laminar.operators.rollout.engines.torch_weights import load_weights
from laminar.operators.weights import TensorView
from laminar.schemas.errors import WeightsMismatch


class _Tied(torch.nn.Module):
    """An embedding whose weight is the head's as well, and a scale in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))


def _view(tensor: torch.Tensor, dtype: str) -> TensorView:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return TensorView(dtype=dtype, shape=tuple(tensor.shape), data=memoryview(data))


def _new() -> dict[str, TensorView]:
    return {
        "embed.weight": _view(torch.arange(6.0).reshape(3, 2), "F32"),
        "scale": _view(torch.tensor(0.5, dtype=torch.bfloat16), "BF16"),
    }


def _state(module: torch.nn.Module) -> dict[str, list[float]]:
    return {name: tensor.float().reshape(-1).tolist() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_pair_is_enough(name: str) -> None:
    module = _Tied()
    weights = _new()
    weights[name] = weights.pop("embed.weight")
    load_weights(module, weights)
    assert module.head.weight.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert module.head.weight is module.embed.weight
    assert module.scale.item() == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": None}, "scale missing"),
        ({"embed.weight": None}, "embed.weight missing"),
        ({"model.scale": _new()["scale"]}, "model.scale not in the model"),
        ({"scale": replace(_new()["scale"], dtype="F16")}, "dtype F16, the model has BF16"),
        ({"scale": replace(_new()["scale"], dtype="Q4")}, "dtype Q4"),
        ({"embed.weight": replace(_new()["embed.weight"], shape=(2, 3))}, r"shape \[2, 3\], the model has \[3, 2\]"),
        ({"embed.weight": replace(_new()["embed.weight"], data=memoryview(bytes(20)))}, "20 bytes"),
    ],
)
def test_d12_a_set_of_weights_that_is_not_the_models_changes_nothing(
    change: dict[str, TensorView | None], words: str
) -> None:
    module = _Tied()
    before = _state(module)
    weights = {name: view for name, view in {**_new(), **change}.items() if view is not None}
    with pytest.raises(WeightsMismatch, match=words):
        load_weights(module, weights)
    assert _state(module) == before


def test_a_parameter_that_is_not_contiguous_is_filled_as_well() -> None:
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.zeros(3, 2).t()))
    load_weights(module, {"w": _view(torch.arange(6.0).reshape(2, 3), "F32")})
    assert module.w.tolist() == [[0, 1, 2], [3, 4, 5]]
