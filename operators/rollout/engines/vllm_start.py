"""Starting vLLM in this process: its environment, its arguments, its errors as one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from laminar.operators.rollout.engines.vllm_names import INSTALL
from laminar.schemas.errors import ConfigError

__all__ = ["FAULTS", "reason", "start"]

FAULTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What vLLM, a library with errors of every kind, raises when something inside it goes wrong."""


def start(
    folder: Path,
    *,
    dtype: str,
    max_running: int,
    kv_total: int | None,
    max_model_len: int | None,
    threads: int,
    trust_remote_code: bool,
    args: Mapping[str, Any],
    env: Mapping[str, str],
) -> Any:
    """vLLM's ``LLMEngine`` over a model folder. Raises ConfigError, saying what would be valid as far as vLLM does."""
    if find_spec("vllm") is None:
        raise ConfigError(f"engine.kind: {INSTALL}")
    os.environ.update(env)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_total without a word
    if args.get("enforce_eager"):
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its compiler would take 6 to 24 s of the first request
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder}: has no config.json, so it is no Hugging Face model folder")

    given: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_num_seqs": max_running,
        "trust_remote_code": trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        **args,
    }
    if max_model_len is not None:
        given["max_model_len"] = max_model_len
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM about itself and its dependencies
            return _engine(given, kv_total, threads)
    except FAULTS as error:
        raise ConfigError(f"engine: vLLM cannot serve {folder}: {reason(error)}") from error


def _engine(given: Mapping[str, Any], kv_total: int | None, threads: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**given).create_engine_config()
    if config.parallel_config.world_size > 1:
        raise ConfigError("engine.args: more than one worker (tensor or pipeline parallel) is not supported yet")
    if kv_total is not None:
        _limit_cache(config, kv_total, given.get("max_model_len"))
    torch.set_num_threads(threads)
    return LLMEngine(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False
    )


def reason(error: BaseException) -> str:
    """An error as one line."""
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic's: many lines, of which the messages count
        found = [f"{'.'.join(str(part) for part in one['loc']) or 'value'}: {one['msg']}" for one in details()]
        return "; ".join(" ".join(one.split()) for one in found)
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _limit_cache(config: Any, kv_total: int, max_model_len: int | None) -> None:
    """``kv_total`` tokens, in whole blocks and the one that vLLM never fills."""
    size = config.cache_config.block_size
    blocks = kv_total // size
    room = blocks * size
    longest = config.model_config.max_model_len
    if max_model_len is None and 0 < room < longest:
        config.model_config.max_model_len = longest = room
    if room < longest:
        raise ConfigError(
            f"engine.kv_total: {kv_total} tokens are {blocks} blocks of {size}, less than one sequence of"
            f" max_model_len={longest} (valid: {-(-longest // size) * size} and more, or a smaller"
            " engine.max_model_len or args.block_size)"
        )
    config.cache_config.num_gpu_blocks_override = blocks + 1
