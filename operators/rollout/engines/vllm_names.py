"""What of vLLM a run file may name, known without importing vLLM (which takes ten seconds, and may not be installed).

The names of its engine arguments are read from the source of the vLLM that is installed. Without one, every name
passes: the process that is to run vLLM says then that it is missing.

>>> environment({"VLLM_LOGGING_LEVEL": "INFO"})["VLLM_LOGGING_LEVEL"]
'INFO'
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["INSTALL", "argument_names", "check_arguments", "environment"]

INSTALL = (
    "vLLM is not installed here: on a GPU machine `pip install 'laminar-rl[vllm]'`, on a CPU `make vllm`"
    " (or run with engine.kind=torch)"
)

_OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_num_seqs": "engine.max_running",
    "max_model_len": "engine.max_model_len",
    "num_gpu_blocks_override": "engine.kv_total",
}
"""vLLM's name -> where the run file says it."""

_FIXED = {
    "logprobs_mode": "processed_logprobs: a logprob is of the distribution that the token was drawn from",
    "disable_log_stats": "true: the rollout reports its own",
    "quantization": "null: weights are those of the trainer",
    "skip_tokenizer_init": "false: the text of a response is recorded",
}
"""vLLM's name -> what it is here, and why."""

_HERE = "new weights come through the memory of this machine"

_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((1,), "operators.rollout.replicas is the number of engines"),
    "distributed_executor_backend": (("mp", "uni"), _HERE),
    "nnodes": ((1,), _HERE),
    "pipeline_parallel_size": ((1,), "tensor_parallel_size is for models that are too large for one GPU"),
}
"""vLLM's name -> what it may be besides null, and why."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""The core in this process, its log (errors only) on stderr, nothing sent anywhere, several engines on one CPU, workers
that are no copies of a process with threads."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that vLLM needs here, and those given. Raises ValueError for one that must stay as it is."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if given.get(name, "0") != "0":
        raise ValueError(f"{name} is 0: the engine runs in the operator's process")
    if "VLLM_CPU_KVCACHE_SPACE" in given:
        raise ValueError("VLLM_CPU_KVCACHE_SPACE would override engine.kv_total (valid: args.kv_cache_memory_bytes)")
    return {**_ENVIRONMENT, **given}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that vLLM does not have, with the closest one, or that is not for ``args``."""
    known = argument_names()
    for name in given:
        if name in _OURS:
            raise ValueError(f"{name}: is set by {_OURS[name]}")
        if name in _FIXED:
            raise ValueError(f"{name}: is always {_FIXED[name]}")
        valid, why = _ONLY.get(name, ((), ""))
        if valid and given[name] is not None and given[name] not in valid:
            shown = " or ".join(str(value) for value in valid)
            raise ValueError(f"{name}: {given[name]} (valid: {shown}; {why})")
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(
                f"{name}: vLLM has no such engine argument (closest: {close[0]})"
                if close
                else f"{name}: vLLM has no such engine argument (valid: the fields of its EngineArgs)"
            )


@cache
def argument_names() -> frozenset[str]:
    """Fields of the installed vLLM's ``EngineArgs``; empty when there is none."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        source = Path(folder) / "engine" / "arg_utils.py"
        if source.is_file():
            for node in ast.parse(source.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                    fields = (f.target for f in node.body if isinstance(f, ast.AnnAssign))
                    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()
