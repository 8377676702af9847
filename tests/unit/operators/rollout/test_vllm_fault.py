"""What vLLM says when it cannot start, as one line in the words of a run file."""

from __future__ import annotations

import pytest

from laminar.operators.rollout.engines.memory import is_shortage
from laminar.operators.rollout.engines.vllm_fault import reason

MANUAL = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


@pytest.mark.parametrize(
    ("text", "told", "is_memory"),
    [
        (
            (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
                " initializing the"
                f" engine (this flag also controls CPU memory). {MANUAL}"
            ),
            (
                "no available memory for the cache blocks (valid: a larger args.gpu_memory_utilization, an"
                " args.kv_cache_memory_bytes, a smaller model)"
            ),
            True,
        ),
        (
            (
                "To serve at least one request with the model's max seq len (32768), (4.50 GiB KV cache is"
                " needed, which"
                " is larger than the available KV cache memory (1.20 GiB). Based on the available memory, the estimated"
                f" maximum model length is 8736. Try increasing `gpu_memory_utilization`. {MANUAL}"
            ),
            (
                "one sequence of max_model_len=32768 needs 4.50 GiB, larger than the available KV cache memory of"
                " 1.20 GiB"
                " (valid: engine.max_model_len up to 8736, or a larger args.kv_cache_memory_bytes or"
                " args.gpu_memory_utilization)"
            ),
            True,
        ),
        (
            (
                "To serve at least one request with the model's max seq len (256), (0.01 GiB KV cache is needed, which"
                " is larger than the available KV cache memory (0.0 GiB). Try increasing `gpu_memory_utilization`."
                f" {MANUAL}"
            ),
            (
                "one sequence of max_model_len=256 needs 0.01 GiB, larger than the available KV cache memory of 0.0 GiB"
                " (valid: a larger args.kv_cache_memory_bytes or args.gpu_memory_utilization)"
            ),
            True,
        ),
        (
            (
                "Free memory on device cuda:0 (11.2/79.1 GiB) on startup is less than desired GPU memory"
                " utilization (0.9,"
                " 71.19 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
            ),
            (
                "cuda:0 has 11.2 of 79.1 GiB free, which is less than desired GPU memory utilization:"
                " args.gpu_memory_utilization=0.9 is 71.19 GiB"
            ),
            True,
        ),
        (
            (
                "Worker failed with error 'Available memory on node 0 (3.1/19.3 GiB) on kv cache allocation is"
                " less than"
                " requested memory for kv (64.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE,"
                " or reduce"
                " CPU memory used by other processes.', please check the stack trace above for the root cause"
            ),
            (
                "memory node 0 has 3.1 of 19.3 GiB free, which is less than requested memory for kv: 64.0 GiB (valid: a"
                " smaller engine.kv_total or args.kv_cache_memory_bytes)"
            ),
            True,
        ),
        (
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
                " 1.01 GiB"
                " is free. Including non-PyTorch memory, this process has 78.09 GiB memory in use. See documentation."
            ),
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
                " 1.01 GiB"
                " is free"
            ),
            True,
        ),
        (
            (
                "Value error, Model architectures ['Qwen2ForCausalLN'] are not supported for now."
                " Supported architectures:"
                " dict_keys(['AfmoeForCausalLM', 'Qwen2ForCausalLM', 'Qwen3ForCausalLM', 'GPT2LMHeadModel'])"
            ),
            (
                "architecture Qwen2ForCausalLN is not supported (closest of the 4 that are: Qwen2ForCausalLM,"
                " Qwen3ForCausalLM, AfmoeForCausalLM)"
            ),
            False,
        ),
        ("two\n  lines", "two lines", False),
        ("x" * 5000, "x" * 600 + " ...", False),
    ],
)
def test_an_error_of_vllm_is_one_line_with_its_numbers(text: str, told: str, is_memory: bool) -> None:
    assert reason(ValueError(text)) == told
    assert is_shortage(told) == is_memory


def test_an_error_without_a_message_is_named() -> None:
    assert reason(KeyError()) == "KeyError"
