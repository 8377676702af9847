"""From a model in training to a committed policy version.

Weights go out of band: staged into the local relay, ``prepared`` on the log, sealed, ``committed`` on the log. A reader
that sees a committed manifest can rely on bytes that never change; one that sees none has lost nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from laminar.operators.checkpoint_name import checkpoint_tensors, same_memory
from laminar.operators.trainer.learner import Learner
from laminar.operators.weights import NamedTensor, WeightPublisher
from laminar.schemas.records import Probe, VersionManifest
from laminar.streams.deadline import Deadline

if TYPE_CHECKING:
    import torch

__all__ = ["identity_of", "named_tensors", "publish", "tied_names"]


def publish(
    learner: Learner,
    publisher: WeightPublisher,
    write: Callable[[VersionManifest], None],
    *,
    epoch: int,
    version: int,
    parent: int,
    step: int,
    deadline: Deadline,
    probes: tuple[Probe, ...] = (),
) -> VersionManifest:
    """Publish the learner's weights; return the committed manifest.

    ``probes`` are the learner's, of the same weights: they go with the manifest on the log. ``write`` puts a manifest
    there in a transaction of its own. Raises DeadlineExceeded or Unavailable when the relay does not take the weights
    (nobody sees the version then), and what ``write`` raises.
    """
    prepared = publisher.stage(
        learner.tensors(),
        tied=learner.tied,
        epoch=epoch,
        version=version,
        parent=parent,
        step=step,
        deadline=deadline,
    )
    prepared = dataclasses.replace(prepared, probes=probes)
    write(prepared)
    committed = publisher.seal(prepared, deadline)
    write(committed)
    return committed


def tied_names(model: Any) -> dict[str, str]:
    """Names in the folder of tensors that share memory with an earlier one: alias -> that name."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in checkpoint_tensors(model).items():
        key = same_memory(tensor)
        if key in first:
            tied[name] = first[key]
        else:
            first[key] = name
    return tied


def named_tensors(model: Any, dtype: torch.dtype, tied: Mapping[str, str]) -> Iterator[NamedTensor]:
    """Every tensor that is not tied, by its name in the folder; floating point in ``dtype``, on the host, row-major."""
    import torch

    names = {
        torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
        torch.bool: "BOOL",
    }  # fmt: skip
    for name, tensor in checkpoint_tensors(model).items():
        if name in tied:
            continue
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        flat = cast.to("cpu").contiguous().reshape(-1)
        bytes_N: Any = flat.view(torch.uint8).numpy()
        data = memoryview(bytes_N)
        yield NamedTensor(name=name, dtype=names[cast.dtype], shape=tuple(tensor.shape), data=data)


def identity_of(model: Any) -> str:
    """Class, number of parameters and a digest over names and shapes: ``Qwen2ForCausalLM/78400/3f2a9c01``."""
    table = hashlib.sha256()
    total = 0
    for name, tensor in model.state_dict().items():
        table.update(f"{name}{tuple(tensor.shape)};".encode())
    for parameter in model.parameters():
        total += parameter.numel()
    return f"{type(model).__name__}/{total}/{table.hexdigest()[:8]}"
