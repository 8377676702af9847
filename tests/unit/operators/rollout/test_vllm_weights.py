"""What is checked of new weights before a worker hears of them, and where it then finds them."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laminar.operators.rollout.engines.vllm_weights import Table, located, matched, table_of
from laminar.operators.rollout.engines.vllm_worker import DTYPES, Piece, mapped
from laminar.operators.weights import TensorView
from laminar.schemas.errors import WeightsMismatch

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def _views(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorView]:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    return {
        name: TensorView(
            dtype=codes[tensor.dtype],
            shape=tuple(tensor.shape),
            data=memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in tensors.items()
    }


def _table(tensors: Mapping[str, torch.Tensor]) -> Table:
    return {name: (view.dtype, view.shape) for name, view in _views(tensors).items()}


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_d1_one_value_that_is_not_finite_is_seen_wherever_it_stands(dtype: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, generator=generator).to(DTYPES[NAMES[dtype]])
    table = _table({"w": weight})
    assert matched(table, _views({"w": weight}), tied=False).keys() == {"w"}
    for place in (0, 1, 15, 16, 17, 500, 998, 999, *torch.randint(1000, (50,), generator=generator).tolist()):
        changed = weight.clone()
        changed[place] = bad
        with pytest.raises(WeightsMismatch, match=r"weights\.w: not all of its 1000 values are finite"):
            matched(table, _views({"w": changed}), tied=False)


@pytest.mark.parametrize("dtype", NAMES)
def test_the_largest_values_of_a_dtype_are_finite(dtype: str) -> None:
    most = torch.finfo(DTYPES[NAMES[dtype]]).max
    weight = torch.full((100,), most, dtype=DTYPES[NAMES[dtype]])
    assert matched(_table({"w": weight}), _views({"w": weight}), tied=False)


def test_a_folder_says_what_must_come_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3), "ids": torch.zeros(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert table_of(tmp_path, "bfloat16") == {"w": ("BF16", (2, 3)), "ids": ("I64", (4,))}


def test_d12_a_tied_output_layer_may_come_and_is_not_passed_on() -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": torch.ones(3, 2)}
    assert matched(_table({"model.embed_tokens.weight": torch.ones(3, 2)}), _views(tensors), tied=True).keys() == {
        "model.embed_tokens.weight"
    }
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight not in the model"):
        matched(_table({"model.embed_tokens.weight": torch.ones(3, 2)}), _views(tensors), tied=False)


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(7, dtype=torch.float32),
        "none": torch.zeros(0, 4),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "c": torch.tensor(3.0, dtype=torch.float16),
    }


def test_tensors_of_no_file_and_of_a_file_are_found_where_they_are_said_to_lie() -> None:
    tensors = _tensors()
    views = _views(tensors)
    fd = os.memfd_create("slot")
    os.pwrite(fd, views["a"].data, 128)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    view = views["a"]
    views["a"] = TensorView(dtype=view.dtype, shape=view.shape, data=view.data, path=path, offset=128)
    with located(views) as pieces:
        assert pieces[0] == Piece("a", "F32", (7,), path, 128, 28)
        assert len({piece.path for piece in pieces}) == 2
        with mapped(pieces) as found:
            for name, tensor in found:
                assert tensor.dtype == tensors[name].dtype
                assert torch.equal(tensor, tensors[name])
                del tensor
        own = pieces[1].path
    os.close(fd)
    assert not Path(own).exists()


def test_a_tensor_that_outlives_the_loading_is_an_error() -> None:
    """What vLLM keeps would change under it when the slot is written anew."""
    with located(_views(_tensors())) as pieces:
        kept = []
        with pytest.raises(RuntimeError, match="still uses weights in /proc"), mapped(pieces) as found:
            kept.append(dict(found)["b"])
        del kept


def test_layers_that_only_refer_to_themselves_are_no_error() -> None:
    with located(_views(_tensors())) as pieces:
        gc.disable()
        try:
            with mapped(pieces) as found:
                ring: list[object] = [dict(found)]
                ring.append(ring)
                del ring
        finally:
            gc.enable()


def test_a_file_that_ends_early_is_an_error_before_anything_is_read() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 16)
    piece = Piece("a", "F32", (7,), f"/proc/{os.getpid()}/fd/{fd}", 0, 28)
    with pytest.raises(ValueError, match="greater than file size"), mapped([piece]):
        pass
    os.close(fd)
