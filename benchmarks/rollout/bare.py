"""vLLM by itself: its own ``LLMEngine`` in a loop, with text, deltas and statistics switched off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rollout.cost import Cost, Meter
from benchmarks.rollout.workload import BATCH, LONGEST, Workload
from laminar.operators.rollout.engines.vllm_names import environment
from laminar.operators.rollout.engines.vllm_row import seed_of

__all__ = ["Steps", "arguments", "run_bare", "start_bare"]


def arguments() -> dict[str, Any]:
    """vLLM's arguments on both sides, beside those that the operator's engine gives by itself."""
    return {"enforce_eager": True, "block_size": 32}


def start_bare(folder: Path) -> Any:
    """An ``LLMEngine`` whose core runs in a process of its own, as vLLM has it by default."""
    os.environ.update(environment({}))
    os.environ.update({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    given: Mapping[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "max_num_seqs": BATCH,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "max_model_len": LONGEST,
        "async_scheduling": False,
        "kv_cache_memory_bytes": 1 << 30,
        **arguments(),
    }
    config = EngineArgs(**given).create_engine_config()
    return LLMEngine(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=True
    )


class Steps:
    """How many steps a scheduler in this process takes."""

    def __init__(self, scheduler: Any) -> None:
        self.n = 0
        schedule = scheduler.schedule

        def counted(*given: Any) -> Any:
            self.n += 1
            return schedule(*given)

        scheduler.schedule = counted


def run_bare(vllm: Any, workload: Workload, round_: int) -> Cost:
    """All requests at once, until the last has ended. What came out is kept until then."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm.reset_prefix_cache()
    requests = list(workload.requests(round_))
    kept: list[Any] = []
    meter = Meter()
    for request in requests:
        how = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            seed=seed_of(request.seed, 0),
            stop_token_ids=[],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        vllm.add_request(f"bare/{request.trajectory_id}", {"prompt_token_ids": list(request.prompt_ids)}, how)
    while vllm.has_unfinished_requests():
        kept += vllm.step()
    cost = meter.read()
    n = sum(len(output.outputs[0].token_ids) for output in kept)
    if n != workload.n_tokens or any(output.outputs[0].logprobs is None for output in kept):
        raise AssertionError(f"bare vLLM returned {n} tokens of {workload.n_tokens}, or no logprobs")
    return cost
