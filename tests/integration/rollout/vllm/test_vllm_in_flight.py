"""The rollout operator around vLLM in both modes of updates: what the log says of each token is true (C4, C8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from laminar.schemas.records import UpdateMode
from laminar.streams.audit import audit
from tests.integration.rollout.flying import complete, prompts, stage_with, worst
from tests.integration.rollout.vllm.conftest import ARGS, VOCAB, Policy, changed

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

EMBEDDING = "model.embed_tokens.weight"

both_modes = pytest.mark.parametrize("updates", ["in_flight", "pinned"])


def _ids(n: int) -> list[list[int]]:
    """Prompts of three blocks and more, each of which begins like another one."""
    rng = np.random.default_rng(3)
    begins = [rng.integers(4, VOCAB, 70).tolist() for _ in range(n // 2)]
    return [begin + rng.integers(4, VOCAB, int(rng.integers(27, 60))).tolist() for begin in begins for _ in range(2)]


@both_modes
def test_c4_c8_each_logprob_is_the_trainers_under_the_version_that_the_log_says(
    engine: VllmEngine, policy: Policy, updates: UpdateMode
) -> None:
    stage = stage_with(policy.weights)
    prompts(stage, _ids(12), max_tokens=60)
    rollout = stage.rollout(engine=engine, updates=updates)  # type: ignore[arg-type]
    done = complete(stage, 24, rollouts=[rollout], every=6)
    assert worst(done.values(), policy.model) < 1e-4
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations
    if updates == "pinned":
        assert ledger.max_versions_per_trajectory == 1
        assert len({one.version_min for one in done.values()}) > 1
    else:
        assert ledger.mean_versions_per_trajectory > 2


@both_modes
def test_c4_weights_that_say_their_version_agree_with_the_log_for_1000_trajectories_under_constant_updates(
    engine: VllmEngine, policy: Policy, updates: UpdateMode
) -> None:
    weights = policy.weights(0)
    for name, view in weights.items():  # no layer adds anything, every token looks the same: the output layer decides
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights = changed(weights, name, np.zeros(view.shape))
    weights = changed(weights, "model.norm.weight", np.ones(weights["model.norm.weight"].shape))

    def saying(version: int) -> Any:
        rows = np.ones(weights[EMBEDDING].shape)  # tied: it is the output layer too
        rows[version % VOCAB] = 3.0
        return changed(weights, EMBEDDING, rows)

    engine.load(saying(0), 0)
    stage = stage_with(saying)
    rng = np.random.default_rng(0)
    for index in range(250):
        prompts(stage, [[4, 5, 6]], first=index, max_tokens=int(rng.integers(2, 9)), group_size=4)
    rollout = stage.rollout(engine=engine, updates=updates, delta_s=0.5, finish_s=0.1)  # type: ignore[arg-type]
    done = complete(stage, 1000, rollouts=[rollout], every=3)
    assert len(done) == 1000
    for one in done.values():
        versions_T = one.response.versions_T
        assert one.response.ids_T.tolist() == (versions_T % VOCAB).tolist(), one.trajectory_id
        assert (np.diff(versions_T) >= 0).all()
    assert len({one.version_max for one in done.values()}) > 60
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations
    assert (ledger.max_versions_per_trajectory == 1) == (updates == "pinned")


def test_more_tokens_than_one_step_reads_are_read_again_after_a_load(
    start: Callable[..., VllmEngine], policy: Policy
) -> None:
    """On a CPU a sequence that was read in two pieces ended vLLM."""
    engine = start(args={**ARGS, "max_num_batched_tokens": 256})
    stage = stage_with(policy.weights)
    prompts(stage, _ids(8), max_tokens=40)
    done = complete(stage, 16, rollouts=[stage.rollout(engine=engine, updates="in_flight")], every=6)  # type: ignore[arg-type]
    assert worst(done.values(), policy.model) < 1e-4
