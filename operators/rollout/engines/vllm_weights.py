"""New weights into a running vLLM model: everything is checked first, then vLLM's layerwise reload does it.

vLLM fuses what a checkpoint holds apart (``qkv_proj``, ``gate_up_proj``) and repacks it for its kernels, and it passes
over names that are missing. So the set that must come is read from the model folder, from which the same vLLM has just
loaded everything that it needs: the same names and shapes, in the run's dtype, and finite numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, WeightsMismatch

__all__ = ["Table", "matched", "reload", "table_of"]

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_RUN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATING = {"F64", "F32", "F16", "BF16"}
_HEAD = "lm_head.weight"


def table_of(folder: Path, dtype: str) -> Table:
    """What the folder's safetensors hold, floating point tensors in the run's ``dtype``. Raises ConfigError."""
    wanted = _RUN_DTYPES[dtype]
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                    part = opened.get_slice(name)
                    kept = part.get_dtype()
                    table[name] = (wanted if kept in _FLOATING else kept, tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.path: {file}: cannot be read as safetensors ({error})") from error
    if not table:
        raise ConfigError(f"model.path: {folder}: has no *.safetensors, whose names say what new weights must bring")
    return table


def matched(table: Table, weights: Mapping[str, TensorView], *, tied: bool) -> list[tuple[str, Tensor]]:
    """Tensors over the memory of ``weights``. ``tied``: the output layer is the embedding, and may be left out.

    Raises WeightsMismatch: a missing or unknown name, another shape or dtype, bytes of another size, a value that is
    not finite.
    """
    free = {_HEAD} if tied else set()
    unknown = weights.keys() - table.keys() - free
    if unknown:
        raise WeightsMismatch(f"weights: {_some(unknown)} not in the model")
    missing = table.keys() - weights.keys() - free
    if missing:
        raise WeightsMismatch(f"weights: {_some(missing)} missing")
    names = [name for name in weights if name not in free]
    for name in names:
        _check(name, table[name], weights[name])
    tensors = [(name, _tensor(weights[name])) for name in names]
    for name, tensor in tensors:
        # A sum is finite only if every part is; one pass at the speed of memory.
        if tensor.is_floating_point() and not math.isfinite(tensor.sum(dtype=torch.float64).item()):
            raise WeightsMismatch(f"weights.{name}: not all of its {tensor.numel()} values are finite")
    return tensors


def reload(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Run in the worker: the number of tensors that vLLM took."""
    taken = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for pair in tensors:
            taken += 1
            yield pair

    worker.model_runner.reload_weights(weights_iterator=counted(), is_checkpoint_format=True)
    _pack_heads(worker.model_runner.get_model())
    return taken


def _pack_heads(model: Any) -> None:
    """Pack the output layer anew: on a CPU it samples from a packed copy, which a reload leaves as it is when tied."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _check(name: str, wanted: tuple[str, tuple[int, ...]], view: TensorView) -> None:
    dtype, shape = wanted
    if tuple(view.shape) != shape:
        raise WeightsMismatch(f"weights.{name}: shape {list(view.shape)}, the model has {list(shape)}")
    if view.dtype != dtype:
        raise WeightsMismatch(f"weights.{name}: dtype {view.dtype}, the model has {dtype}")
    size = math.prod(shape) * _DTYPES[dtype].itemsize
    if view.data.nbytes != size:
        raise WeightsMismatch(f"weights.{name}: {view.data.nbytes} bytes, but {dtype} {list(shape)} has {size}")


def _tensor(view: TensorView) -> Tensor:
    if not view.data.nbytes:
        return torch.empty(view.shape, dtype=_DTYPES[view.dtype])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view.data, dtype=_DTYPES[view.dtype]).reshape(view.shape)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown} and {len(ordered) - 3} more are"
