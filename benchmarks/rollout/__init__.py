"""What ``benchmarks.vllm_rollout`` is made of."""
