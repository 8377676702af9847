"""A lag of 8 versions: the sampler's logprobs keep GRPO learning; without them it does not.

A stream of logprobs that is dropped, misaligned or taken at the wrong temperature fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from laminar.operators.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from laminar.pipeline.examples import write
from tests.integration.trainer.lagged_loop import LaggedLoop

STEPS = 40
LAG = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("sortl", tmp_path_factory.mktemp("examples") / "sortl").directory


def _accuracy(folder: Path, behaviour_logprobs: Literal["sampler", "trainer"]) -> tuple[float, float]:
    config = TrainerConfig(
        algorithm=AlgorithmConfig(behaviour_logprobs=behaviour_logprobs),
        optimizer=OptimizerConfig(lr=7e-4),
        device="cpu",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop = LaggedLoop(folder, config, lag=LAG, steps=STEPS, seed=0)
        before = loop.accuracy()
        loop.run(STEPS)
        return before, loop.accuracy()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_the_samplers_logprobs_a_lag_of_8_versions_is_learnt_from(folder: Path) -> None:
    before, after = _accuracy(folder, "sampler")
    assert before < 0.35
    assert after > 0.60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_the_trainers_own_logprobs_a_lag_of_8_versions_is_not_corrected(folder: Path) -> None:
    _, after = _accuracy(folder, "trainer")
    assert after < 0.45
