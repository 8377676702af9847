"""What runs inside vLLM's workers, wherever they live: this process, or others of this machine (tensor parallel).

Only names, shapes and places go to a worker. It maps the file in which the new weights lie, and vLLM takes its shard
from there; nothing of them passes through a pipe or a disk.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

__all__ = ["DTYPES", "Piece", "leave", "mapped", "reload", "settle", "take"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names."""

_PR_SET_PDEATHSIG = 1


class Piece(NamedTuple):
    """One tensor of new weights, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    size: int


def settle(worker: Any, parent: int, tied: bool) -> None:  # noqa: ARG001  (what vLLM calls is given its worker)
    """Once, after the start: a worker process ends when its engine says so, or with it, and for no other reason.

    A signal to the whole group (Ctrl-C, a service manager's stop) would end it while the operator still drains.
    ``tied``: the thread that started it lives as long as its process, so that the kernel may end one with the other.
    """
    if os.getpid() == parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if tied:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    group = os.environ.get("VLLM_DIST_IDENT")  # on a CPU: workers have found each other, nobody needs the names now
    if group:
        for name in Path("/dev/shm").glob(f"{group}-*"):  # noqa: S108
            name.unlink(missing_ok=True)


def leave(worker: Any) -> NoReturn:  # noqa: ARG001
    """End a worker process from the inside. It does not answer."""
    raise SystemExit(0)


def reload(worker: Any, pieces: Sequence[Piece]) -> int:
    """New weights into a worker's model: the number of tensors that vLLM took."""
    with mapped(pieces) as tensors:
        return take(worker, tensors)


def take(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """vLLM's layerwise reload; the number of tensors that it asked for."""
    taken = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for pair in tensors:
            taken += 1
            yield pair

    worker.model_runner.reload_weights(weights_iterator=counted(), is_checkpoint_format=True)
    model = worker.model_runner.get_model()
    _pack_heads(model)
    _pack_experts(model)
    return taken


@contextmanager
def mapped(pieces: Sequence[Piece]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The tensors over the memory of their files. Raises RuntimeError when one of them is still in use at the end."""
    maps: dict[str, mmap.mmap] = {}
    for path in {piece.path for piece in pieces if piece.size}:
        end = max(piece.offset + piece.size for piece in pieces if piece.path == path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            maps[path] = mmap.mmap(fd, end, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = [(piece.name, _tensor(maps, piece)) for piece in pieces]
    yield _handed_out(tensors)
    for path, opened in maps.items():
        try:
            opened.close()
        except BufferError:
            gc.collect()  # layers refer to themselves
            try:
                opened.close()
            except BufferError as error:
                raise RuntimeError(f"vLLM still uses weights in {path} after it took them") from error


def _handed_out(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """In order, each given up with it."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def _tensor(maps: dict[str, mmap.mmap], piece: Piece) -> Tensor:
    dtype = DTYPES[piece.dtype]
    if not piece.size:
        return torch.empty(piece.shape, dtype=dtype)
    # numpy, unlike torch.frombuffer, keeps a mapping from being closed while a tensor over it lives.
    bytes_N = np.frombuffer(maps[piece.path], np.uint8, piece.size, piece.offset)
    return torch.from_numpy(bytes_N).view(dtype).reshape(piece.shape)


def _pack_heads(model: Any) -> None:
    """Pack the output layer anew: on a CPU it samples from a packed copy, which a reload leaves as it is when tied.

    A tied one takes the copy that vLLM has just made for the embedding, which is of the same weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed = {
        id(module.weight): module.cpu_linear
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and not isinstance(module, ParallelLMHead)
        and hasattr(module, "cpu_linear")
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            if id(module.weight) in packed:
                module.cpu_linear = packed[id(module.weight)]
            else:
                module.quant_method.process_weights_after_loading(module)


def _pack_experts(model: Any) -> None:
    """Pack the experts of a mixture anew: on a CPU a reload leaves them as they come where packed ones are expected."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and "w13_weight" in module._parameters:
            kernel.fused_experts.process_weights_after_loading(module)
