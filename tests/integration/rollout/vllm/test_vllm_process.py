"""vLLM in a process of its own: without the memory to start, and with workers. The contract suite has the rest."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.text import decimal
from laminar.schemas.errors import ConfigError, EngineLost
from laminar.schemas.records import Sampling
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import ARGS, VOCAB, Policy

if TYPE_CHECKING:
    from laminar.operators.rollout.engine import Engine
    from laminar.operators.rollout.engines.vllm import VllmEngine

WAIT_S = 120.0
PROMPTS = [np.random.default_rng(6).integers(4, VOCAB, n).tolist() for n in (5, 40, 70)]


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


def _greedy(engine: Engine) -> Drive:
    names = [f"t/{i}" for i in range(len(PROMPTS))]
    for name, prompt in zip(names, PROMPTS, strict=True):
        sampling = Sampling(max_tokens=40, temperature=0.0)
        engine.submit(EngineRequest(trajectory_id=name, prompt_ids=tuple(prompt), sampling=sampling, seed=3))
    drive = Drive(engine)
    drive.until_finished(names)
    return drive


def _poll_on(engine: Engine) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        engine.poll(0.1)


def _below(pid: int) -> list[int]:
    """Every process that it started, and theirs."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found += [child, *_below(child)]
    return found


def _living(pids: Sequence[int]) -> list[int]:
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid for pid, file in stats.items() if file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def test_two_workers_below_an_engine_process_sample_what_one_does_and_end_and_come_back_with_it(
    engine: VllmEngine, policy: Policy
) -> None:
    options = {
        "model_path": str(policy.path),
        "max_running": 8,
        "max_model_len": 256,
        "kv_total": 4096,
        "threads": 1,
        "eos_token_ids": (),
        "args": {**ARGS, "tensor_parallel_size": 2},
    }
    recipe = Recipe(factory="laminar.operators.rollout.engines.vllm:VllmEngine", options=options)
    two = RemoteEngine(recipe, decoder=lambda: decimal)
    try:
        engine.load(policy.weights(1), 1)
        expected = _greedy(engine)
        for start in range(2):
            two.load(policy.weights(1), 1)
            found = _greedy(two)
            for name, tokens in ((name, found.tokens(name)) for name in found.finish):
                assert tokens.ids == expected.tokens(name).ids, start
                assert np.abs(tokens.logprobs_T - expected.tokens(name).logprobs_T).max() < 1e-4
            assert two.pid is not None
            processes = [two.pid, *_below(two.pid)]
            assert len(processes) >= 3
            if start:
                break
            os.kill(two.pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="was killed by SIGKILL"):
                _poll_on(two)
            until = time.monotonic() + WAIT_S
            while _living(processes) or not two.ready:
                assert time.monotonic() < until, "its workers are gone, and it is back"
                two.poll(0.1)
            assert two.version == -1
    finally:
        two.close()
    until = time.monotonic() + WAIT_S
    while _living(processes) and time.monotonic() < until:
        time.sleep(0.1)
    assert _living(processes) == []
