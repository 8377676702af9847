"""``updates: in_flight`` with the torch engine: each token is of the version that the log says, also across owners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from laminar.operators.operator import ModelConfig
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.rollout.engines.text import load_decoder
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.records import UpdateMode
from laminar.streams.audit import audit
from tests.integration.rollout.flying import complete, prompts, publish, stage_with, worst
from tests.integration.rollout.vllm.conftest import VOCAB, Policy
from tests.unit.operators.rollout.stage import Stage


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    made = Policy(tmp_path_factory.mktemp("policy"))
    made.save()
    return made


@pytest.fixture
def stage(policy: Policy) -> Stage:
    return stage_with(policy.weights)


@pytest.fixture
def rollout(stage: Stage, policy: Policy) -> Callable[..., Rollout]:
    def make(index: int = 0, **config: object) -> Rollout:
        engine = TorchEngine(policy.path, max_running=8, steps_per_poll=2, eos_token_ids=())
        return stage.rollout(index, engine=engine, **config)  # type: ignore[arg-type]

    return make


def ids(n: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(4, VOCAB, int(rng.integers(5, 40))).tolist() for _ in range(n)]


@pytest.mark.parametrize("updates", ["in_flight", "pinned"])
def test_c4_c8_every_logprob_is_the_trainers_under_the_recorded_version(
    stage: Stage, policy: Policy, rollout: Callable[..., Rollout], updates: UpdateMode
) -> None:
    prompts(stage, ids(12), max_tokens=50)
    done = complete(stage, 24, rollouts=[rollout(updates=updates)], every=10)
    assert worst(done.values(), policy.model) < 1e-4
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations
    assert {one.updates for one in done.values()} == {updates}
    if updates == "pinned":
        assert ledger.max_versions_per_trajectory == 1
        assert len({one.version_min for one in done.values()}) > 1
    else:
        assert ledger.mean_versions_per_trajectory > 2


def test_c4_an_engine_in_a_process_of_its_own_says_the_version_of_each_token_too(stage: Stage, policy: Policy) -> None:
    """It decodes on while the operator is on its way with new weights."""
    recipe = Recipe(
        factory="laminar.operators.rollout.engines.torch:TorchEngine",
        options={
            "model_path": str(policy.path), "max_running": 8, "threads": 1, "steps_per_poll": 1, "eos_token_ids": (),
        },
    )  # fmt: skip
    engine = RemoteEngine(
        recipe,
        decoder=lambda: load_decoder(ModelConfig(path=policy.path)),
        settings=RemoteSettings(ahead=4, gather_s=0.0),
    )
    rollout = stage.rollout(engine=engine, updates="in_flight", lease_s=1000.0)  # type: ignore[arg-type]
    try:
        prompts(stage, ids(8), max_tokens=50)
        done = complete(stage, 16, rollouts=[rollout], every=10)
    finally:
        rollout.close()
    assert worst(done.values(), policy.model) < 1e-4
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations
    assert ledger.mean_versions_per_trajectory > 1.5


def test_a6_what_a_killed_rollout_had_is_gone_on_with_under_newer_weights(
    stage: Stage, policy: Policy, rollout: Callable[..., Rollout]
) -> None:
    first = rollout(0, updates="in_flight", lease_s=1.0)
    second = rollout(1, updates="in_flight", lease_s=1.0)
    mover = Repack(
        RepackConfig(period_s=1.0, dead_after_s=1.0, version_wait_s=2.0),
        replace(stage.world.context("repack"), instance="repack-0"),
    )
    stage.run(0.3, first, second, mover)
    prompts(stage, ids(8), max_tokens=80)
    for version in (1, 2):
        stage.run(0.12, first, second, mover)
        publish(stage, version)
    stage.run(0.12, first, second, mover)
    victim, rest = (first, second) if len(first._work.ledger) else (second, first)
    assert any(one.n_response for one in victim._work.ledger)
    victim.close()  # killed: no drain
    publish(stage, 3)
    done = complete(stage, 16, mover, rollouts=[rest], versions=0)
    moved = {one.trajectory_id for one in stage.read("trajectories.partial", r.TrajectoryMoved)}
    both = [one for one in done.values() if one.trajectory_id in moved and one.version_min < one.version_max]
    assert both
    assert worst(done.values(), policy.model) < 1e-4
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations
