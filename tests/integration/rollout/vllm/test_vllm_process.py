"""vLLM in a process of its own: without the memory to start. The contract suite has the rest."""

from __future__ import annotations

import re

import pytest

from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.text import decimal
from laminar.schemas.errors import ConfigError
from tests.integration.rollout.vllm.conftest import ARGS, Policy


def test_want_of_memory_at_start_is_one_line_with_the_numbers(policy: Policy) -> None:
    options = {
        "model_path": str(policy.path),
        "max_running": 8,
        "max_model_len": 256,
        "threads": 1,
        "args": {**ARGS, "kv_cache_memory_bytes": 1 << 45},
    }
    recipe = Recipe(factory="laminar.operators.rollout.engines.vllm:VllmEngine", options=options)
    with pytest.raises(ConfigError) as caught:
        RemoteEngine(recipe, decoder=lambda: decimal)
    said = str(caught.value)
    assert re.search(
        r"not enough memory to start: a KV cache of 2048 tokens .* is [\d.]+ GiB, 512 bytes a token;"
        r" memory: [\d.]+ of [\d.]+ GiB free.*requested memory for kv: 32768",
        said,
    ), said
    assert "\n" not in said
