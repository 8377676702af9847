"""Starting vLLM: its environment, its arguments, what of a model folder it does not say itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from laminar.operators.rollout.engines.vllm_fault import reason
from laminar.operators.rollout.engines.vllm_names import INSTALL, check_arguments
from laminar.operators.rollout.engines.vllm_weights import table_of
from laminar.schemas.errors import ConfigError

__all__ = ["end_tokens", "start"]

_KV_ARGS = {"kv_cache_memory_bytes", "gpu_memory_utilization"}
"""vLLM's own ways to say how large the cache is."""


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
    try:
        check_arguments(args)
    except ValueError as error:
        raise ConfigError(f"engine.args: {error}") from error
    os.environ.update(env)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_total without a word
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder}: has no config.json, so it is no Hugging Face model folder")
    table_of(folder, dtype)  # names a file that cannot be read, which vLLM does not

    given: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_num_seqs": max_running,
        "trust_remote_code": trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **args,
    }
    if max_model_len is not None:
        given["max_model_len"] = max_model_len
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM about itself and its dependencies
            return _engine(_with_defaults(given), kv_total, threads)
    except ConfigError:
        raise
    except Exception as error:  # a worker that could not start is no more than that
        raise ConfigError(f"engine: vLLM cannot serve {folder}: {reason(error)}") from error


def _engine(given: Mapping[str, Any], kv_total: int | None, threads: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**given).create_engine_config()
    config.scheduler_config.async_scheduling = bool(given["async_scheduling"])  # which a CPU would never have
    if kv_total is None and _is_cpu() and not _KV_ARGS & given.keys():
        kv_total = _for_all(config, given["max_num_seqs"])
    if kv_total is not None:
        _limit_cache(config, kv_total, given.get("max_model_len"))
        if not _KV_ARGS & given.keys():
            _reserve(config)
    torch.set_num_threads(threads)
    return LLMEngine(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False
    )


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """On a CPU: nothing is compiled unless asked for, blocks are as small as its attention takes them, and a sequence
    is read in one piece: after a piece of one vLLM takes a draw back, which a CPU's generators cannot."""
    on_cpu = {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}
    settings = {**on_cpu, **given} if _is_cpu() else dict(given)
    if settings.get("enforce_eager"):
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its compiler would take 6 to 24 s of the first request
    return settings


def _for_all(config: Any, max_running: int) -> int:
    """Tokens with which every sequence may be as long as the model allows, up to a quarter of what memory is free."""
    size = config.cache_config.block_size
    longest = -(-config.model_config.max_model_len // size) * size
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // config.parallel_config.world_size
    return int(max(longest, min(max_running * longest, free // 4 // _token_bytes(config) // size * size)))


def _reserve(config: Any) -> None:
    """Memory for the cache of that size, and some: else vLLM would want nearly all that the machine has."""
    cache = config.cache_config
    cache.kv_cache_memory_bytes = 2 * cache.num_gpu_blocks_override * cache.block_size * _token_bytes(config)


def _token_bytes(config: Any) -> int:
    """Of one worker's KV cache, for one token, where every layer has attention of the usual kind."""
    model, parallel = config.model_config, config.parallel_config
    numbers = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return int(numbers * model.dtype.itemsize)


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


def end_tokens(folder: Path, *sources: Any) -> set[int]:
    """Every token that ends a response according to the folder."""
    from transformers import GenerationConfig

    found: set[int] = set()
    asked = list(sources)
    if (folder / "generation_config.json").is_file():
        asked.append(GenerationConfig.from_pretrained(folder, local_files_only=True))
    for source in asked:
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return found
