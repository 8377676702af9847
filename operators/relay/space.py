"""Whether shared memory can hold the versions that a relay is to keep: asked before anything is allocated."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from laminar.operators.operator import RunInfo
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.slot import slots
from laminar.schemas.errors import ConfigError

__all__ = ["check_space", "model_bytes"]

_MAX_HEADER_BYTES = 100 * 1024 * 1024
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def model_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model's weights in this dtype, from the headers of its safetensors files; 0 if there are none."""
    return sum(_elements(file) for file in folder.glob("*.safetensors")) * _ITEM_BYTES[dtype]


def check_space(config: RelayConfig, run: RunInfo, folder: Path) -> None:
    """Raise ConfigError, with both numbers, if ``keep_versions`` versions and one more do not fit."""
    version = model_bytes(run.model.path, run.model.dtype)
    need = version * (config.keep_versions + 1)
    where = next((p for p in (folder, *folder.parents) if p.is_dir()), None)
    if not need or where is None:
        return
    stat = os.statvfs(where)
    free = stat.f_bavail * stat.f_frsize + sum(slot.capacity() for slot in slots(folder))
    if free < need:
        raise ConfigError(
            f"shared memory too small: {config.keep_versions + 1} slots for the {version} bytes of "
            f"{run.model.path} need {need} bytes, {where} has {free} free (enlarge it, in a container with "
            "--shm-size, lower relay.keep_versions, or set relay.shm_root)"
        )


def _elements(file: Path) -> int:
    """Numbers in one safetensors file; 0 when it is not one (whoever loads the model says so better)."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: Any = json.loads(stream.read(size)) if size <= _MAX_HEADER_BYTES else {}
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
