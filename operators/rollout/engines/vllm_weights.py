"""New weights for a running vLLM model: everything is checked here before a worker hears of them.

vLLM fuses what a checkpoint holds apart (``qkv_proj``, ``gate_up_proj``) and repacks it for its kernels, and it passes
over names that are missing. So the set that must come is read from the model folder, from which the same vLLM has just
loaded everything that it needs: the same names and shapes, in the run's dtype, and finite numbers.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from laminar.operators.rollout.engines.vllm_worker import DTYPES, Piece
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, WeightsMismatch

__all__ = ["Table", "located", "matched", "table_of"]

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""

_RUN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATING = {"F64", "F32", "F16", "BF16"}
_HEAD = "lm_head.weight"
_ALIGNED = 64


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


def matched(table: Table, weights: Mapping[str, TensorView], *, tied: bool) -> dict[str, TensorView]:
    """What of ``weights`` the model takes. ``tied``: the output layer is the embedding, and may be left out.

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
    views = {name: view for name, view in weights.items() if name not in free}
    for name, view in views.items():
        _check(name, table[name], view)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, view in views.items():
            _check_finite(name, view)
    return views


@contextmanager
def located(views: Mapping[str, TensorView]) -> Iterator[list[Piece]]:
    """Where other processes of this machine find the tensors, while the context is open.

    Those that are in no file yet are copied into one that has no name on any disk.
    """
    loose = {name: view for name, view in views.items() if not view.path}
    fd = os.memfd_create("laminar-weights", os.MFD_CLOEXEC) if loose else -1
    try:
        path, end = f"/proc/{os.getpid()}/fd/{fd}", 0
        pieces = []
        for name, view in views.items():
            size = view.data.nbytes
            if name in loose:
                where, offset = path, end
                end += -(-size // _ALIGNED) * _ALIGNED
                _write(fd, view.data, offset)
            else:
                where, offset = view.path, view.offset
            pieces.append(Piece(name, view.dtype, tuple(view.shape), where, offset, size))
        yield pieces
    finally:
        if fd >= 0:
            os.close(fd)


def _write(fd: int, data: memoryview, offset: int) -> None:
    rest = data.cast("B") if data.nbytes else data
    while rest.nbytes:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _check(name: str, wanted: tuple[str, tuple[int, ...]], view: TensorView) -> None:
    dtype, shape = wanted
    if tuple(view.shape) != shape:
        raise WeightsMismatch(f"weights.{name}: shape {list(view.shape)}, the model has {list(shape)}")
    if view.dtype != dtype:
        raise WeightsMismatch(f"weights.{name}: dtype {view.dtype}, the model has {dtype}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if view.data.nbytes != size:
        raise WeightsMismatch(f"weights.{name}: {view.data.nbytes} bytes, but {dtype} {list(shape)} has {size}")


def _check_finite(name: str, view: TensorView) -> None:
    dtype = DTYPES[view.dtype]
    if not view.data.nbytes or not dtype.is_floating_point:
        return
    tensor = torch.frombuffer(view.data, dtype=dtype)
    # One pass at the speed of memory, and no copy in another dtype, as a sum would make.
    least, most = torch.aminmax(tensor)
    if not (math.isfinite(least.item()) and math.isfinite(most.item())):
        raise WeightsMismatch(f"weights.{name}: not all of its {tensor.numel()} values are finite")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown} and {len(ordered) - 3} more are"
