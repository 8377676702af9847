"""Want of memory at an engine's start: how to know it, and the numbers that say what to change.

>>> is_shortage(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
True
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["is_shortage", "kv_demand", "shortage"]

_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "no available memory for the cache blocks",
    "larger than the available kv cache memory",
    "is less than desired gpu memory utilization",
    "is less than desired cpu memory utilization",
    "is less than requested memory for kv",
)
"""What torch, vLLM and the system say."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GIB = float(1 << 30)


def is_shortage(error: BaseException | str) -> bool:
    """Whether it says that memory is wanting."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _PHRASES)


def shortage(options: Mapping[str, Any]) -> str:
    """The KV cache asked for, and the memory that there is: for an engine with these options."""
    said = [kv_demand(options), *_memory()]
    return "; ".join(one for one in said if one)


def kv_demand(options: Mapping[str, Any]) -> str:
    """Tokens and bytes of the KV cache that these options ask for; empty: nothing can be said.

    Of a model whose layers all have attention of the usual kind.
    """
    try:
        config = json.loads((Path(options["model_path"]) / "config.json").read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return ""
    config = config.get("text_config", config)
    tokens = options.get("kv_total")
    given = "engine.kv_total"
    if tokens is None:
        longest = options.get("max_model_len") or config.get("max_position_embeddings")
        tokens = longest * options.get("max_running", 1) if longest else None
        given = "engine.max_running sequences of engine.max_model_len"
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * config["num_hidden_layers"] * heads * size * _BYTES[options.get("dtype", "float32")]
    except (KeyError, TypeError):
        per_token = None
    if tokens is None:
        return ""
    if per_token is None:
        return f"a KV cache of {tokens} tokens ({given})"
    return f"a KV cache of {tokens} tokens ({given}) is {tokens * per_token / _GIB:.2f} GiB, {per_token} bytes a token"


def _memory() -> list[str]:
    """Free and total, of the machine and of the GPUs that torch sees if it is there already."""
    said = []
    with suppress(OSError, ValueError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free, total = (int(fields[name].split()[0]) / (1 << 20) for name in ("MemAvailable", "MemTotal"))
        said.append(f"memory: {free:.2f} of {total:.2f} GiB free{_group_limit()}")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_available():
        for device in range(cuda.device_count()):
            with suppress(RuntimeError):
                free, total = (n / _GIB for n in cuda.mem_get_info(device))
                said.append(f"GPU {device}: {free:.2f} of {total:.2f} GiB free")
    return said


def _group_limit() -> str:
    """The limit of this process's control group, where there is one."""
    with suppress(OSError, ValueError):
        path = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2].lstrip("/")
        for folder in (Path("/sys/fs/cgroup") / path, Path("/sys/fs/cgroup")):
            if (folder / "memory.max").is_file():
                limit = (folder / "memory.max").read_text(encoding="ascii").strip()
                used = (folder / "memory.current").read_text(encoding="ascii").strip()
                if limit.isdigit():
                    return f", this process's group has used {int(used) / _GIB:.2f} of {int(limit) / _GIB:.2f} GiB"
                break
    return ""
