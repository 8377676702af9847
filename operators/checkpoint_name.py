"""A model's tensors under the names that they have in the safetensors of its folder, which are those of the ecosystem.

transformers keeps some models otherwise than their folders do: the experts of a mixture are one tensor for all of them.
vLLM reads the folder's names, and policy versions are published under them. Each is a view into the model's own
memory, so writing to it changes the model.

>>> sorted(checkpoint_tensors(mixtral))[1]                                               # doctest: +SKIP
'model.layers.0.block_sparse_moe.experts.0.w1.weight'
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from laminar.schemas.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checkpoint_tensors", "refuse_missing", "same_memory"]

logger = logging.getLogger(__name__)

_Part = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Name in the state dict; shape, strides and offset inside that tensor, in elements."""
_KNOWN: WeakKeyDictionary[Any, Mapping[str, _Part] | None] = WeakKeyDictionary()
"""What was found of each model; None: its names are the folder's."""


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Name in the folder -> view, without gradient. Where parts of a name cannot be told apart: the state dict's."""
    state: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model not in _KNOWN:
        _KNOWN[model] = _parts(model, state)
    parts = _KNOWN[model]
    if parts is None:
        return state
    return {
        name: state[source].as_strided(shape, strides, state[source].storage_offset() + offset)
        for name, (source, shape, strides, offset) in parts.items()
    }


def refuse_missing(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise ConfigError when the folder lacks a tensor of its model (``found``: transformers' ``loading_info``).

    transformers would make up random values for it, with no more than a warning.
    """
    missing = sorted(found.get("missing_keys") or ())
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"model.path: {folder}: its safetensors lack {shown} (valid: every tensor of the model that is not tied)"
        )


def same_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory: tied ones."""
    key = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
    return key if tensor.numel() else (id(tensor),)


def _parts(model: Any, state: Mapping[str, Tensor]) -> Mapping[str, _Part] | None:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, revert_weight_conversion
    except ImportError:  # a transformers that keeps every model as its folder does
        return None
    if not hasattr(model, "config"):
        return None
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        used = get_model_conversion_mapping(model, add_legacy=False)
    backwards = [conversion.reverse_transform() for conversion in used]
    kind = type(model).__name__
    if any(isinstance(one, WeightConverter) and len(one.source_patterns) > 1 for one in backwards):
        logger.warning("%s: its folder's names cannot be told one by one: published under transformers' own", kind)
        return None
    parts: dict[str, _Part] = {}
    for source, tensor in state.items():
        for name, made in revert_weight_conversion(model, {source: tensor}).items():
            if made is tensor:
                parts[name] = (source, tuple(tensor.shape), tensor.stride(), 0)
                continue
            found = _strided(revert_weight_conversion(model, {source: _positions(tensor)})[name], tensor)
            if found is None:
                logger.warning("%s: %s is no part of %s: published under transformers' own names", kind, name, source)
                return None
            parts[name] = (source, *found)
    return None if parts.keys() == state.keys() and all(name == part[0] for name, part in parts.items()) else parts


def _positions(tensor: Tensor) -> Tensor:
    import torch

    return torch.arange(tensor.numel()).reshape(tensor.shape)


def _strided(at: Tensor, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides and offset of the part of ``tensor`` (row-major) that stands at these positions."""
    import torch

    if not tensor.is_contiguous() or at.dtype != torch.int64 or not at.numel():
        return None
    offset = int(at.flatten()[0])
    strides = tuple(
        int(at.select(dim, 1).flatten()[0]) - offset if size > 1 else 1 for dim, size in enumerate(at.shape)
    )
    if any(stride < 0 for stride in strides) or math.prod(at.shape) > tensor.numel():
        return None
    again = _positions(tensor).as_strided(at.shape, strides, offset)
    return (tuple(at.shape), strides, offset) if torch.equal(again, at) else None
