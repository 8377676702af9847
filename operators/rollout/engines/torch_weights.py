"""New weights into a model in place: everything is checked first, then everything is copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.operators.checkpoint_name import checkpoint_tensors, same_memory
from laminar.operators.weights import TensorView
from laminar.schemas.errors import WeightsMismatch

__all__ = ["load_weights"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def load_weights(module: Any, weights: Mapping[str, TensorView]) -> None:
    """Copy ``weights`` into ``module``; names are those of its folder.

    Of tensors that share memory (tied), one name is enough. Raises WeightsMismatch, with everything as it was: a
    missing or unknown name, another shape or dtype, bytes of another size.
    """
    pairs = _matched(module, weights)
    with torch.no_grad():
        for target, view in pairs:
            _copy(target, view)


def _matched(module: Any, weights: Mapping[str, TensorView]) -> list[tuple[Tensor, TensorView]]:
    targets = checkpoint_tensors(module)
    unknown = weights.keys() - targets.keys()
    if unknown:
        raise WeightsMismatch(f"weights: {_some(unknown)} not in the model")
    pairs: list[tuple[Tensor, TensorView]] = []
    missing: list[str] = []
    names_of: dict[tuple[Any, ...], list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(same_memory(target), []).append(name)
    for names in names_of.values():
        given = [name for name in names if name in weights]
        if not given:
            missing.append(names[0])
        for name in given:
            _check(name, targets[name], weights[name])
        pairs += [(targets[name], weights[name]) for name in given[:1]]
    if missing:
        raise WeightsMismatch(f"weights: {_some(missing)} missing")
    return pairs


def _check(name: str, target: Tensor, view: TensorView) -> None:
    if tuple(target.shape) != tuple(view.shape):
        raise WeightsMismatch(f"weights.{name}: shape {list(view.shape)}, the model has {list(target.shape)}")
    dtype = _DTYPES.get(view.dtype)
    if dtype != target.dtype:
        wanted = _NAMES.get(target.dtype, str(target.dtype))
        raise WeightsMismatch(f"weights.{name}: dtype {view.dtype}, the model has {wanted}")
    size = math.prod(view.shape) * target.element_size()
    if view.data.nbytes != size:
        raise WeightsMismatch(
            f"weights.{name}: {view.data.nbytes} bytes, but {view.dtype} {list(view.shape)} has {size}"
        )


def _copy(target: Tensor, view: TensorView) -> None:
    source = np.frombuffer(view.data, dtype=np.uint8)
    if target.device.type == "cpu" and target.is_contiguous():
        np.copyto(target.detach().reshape(-1).view(torch.uint8).numpy(), source)
        return
    staged = torch.empty(target.shape, dtype=target.dtype)
    np.copyto(staged.reshape(-1).view(torch.uint8).numpy(), source)
    target.copy_(staged)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown} and {len(ordered) - 3} more are"
