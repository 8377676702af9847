"""A rollout whose engine goes wrong once: nothing that it sampled since is written, and it comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.text import decimal
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.errors import EngineLost, Unavailable
from laminar.schemas.records import UpdateMode
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline
from tests.integration.rollout.flying import Shelf, prompts, worst
from tests.integration.rollout.self_checking import Checking, manifest_of
from tests.integration.rollout.vllm.conftest import VOCAB, Policy
from tests.integration.rollout.wrong_once import WRONG, WrongOnce
from tests.support import sample
from tests.unit.operators.rollout.stage import Stage


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    made = Policy(tmp_path_factory.mktemp("policy"))
    made.save()
    return made


class Anew(WrongOnce):
    """Starts anew when it is asked to, as an engine in a process of its own does."""

    def restart(self, why: str) -> None:
        self.close()
        self._version = -1
        raise EngineLost(f"engine {self.name} was given up: {why}")


def publish(stage: Stage, policy: Policy, version: int) -> None:
    stage.world.write(sample.training_step(version, metrics={}) if version else sample.trainer_started(version=0))
    manifest = replace(manifest_of(policy.model(version), version), epoch=1)
    stage.world.write(replace(manifest, state="prepared"))
    stage.world.write(manifest)


def written(stage: Stage) -> set[int]:
    """The versions of all tokens in the log."""
    partial = [one.tokens for one in stage.read("trajectories.partial", r.TrajectoryTokens)]
    whole = [one.response for one in stage.completed().values()]
    return {version for tokens in (*partial, *whole) for version in tokens.versions_T.tolist()}


@pytest.mark.parametrize("updates", ["pinned", "in_flight"])
@pytest.mark.parametrize("kind", [WrongOnce, Anew], ids=["in the process", "in its own"])
def test_d2_an_engine_that_goes_wrong_once_writes_none_of_it_and_comes_back(
    policy: Policy, kind: type[WrongOnce], updates: UpdateMode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    stage.weights = Shelf(policy.weights)  # type: ignore[assignment]
    config = {"updates": updates, "lease_s": 1.0, "heartbeat_s": 0.2, "load_backoff_s": 0.05}
    mover = Repack(
        RepackConfig(period_s=0.5, dead_after_s=1.0, version_wait_s=2.0),
        replace(stage.world.context("repack"), instance="repack-0"),
    )

    def start(engine: TorchEngine) -> Rollout:
        return stage.rollout(0, engine=engine, **config)  # type: ignore[arg-type]

    mark = tmp_path / "wrong"
    engine = kind(str(policy.path), str(mark))
    given_up = False
    rollout = start(engine)
    rng = np.random.default_rng(7)
    prompts(stage, [rng.integers(4, VOCAB, 20).tolist() for _ in range(16)], max_tokens=60)
    restarts = version = 0
    publish(stage, policy, 0)
    for turn in range(4000):
        if turn % 15 == 14 and version < (4 if mark.exists() else WRONG):
            version += 1
            publish(stage, policy, version)
        try:
            rollout.step(stage.world.now)
        except Unavailable:
            restarts += 1
            rollout.close()
            rollout = start(TorchEngine(policy.path, max_running=8, steps_per_poll=2, eos_token_ids=()))
        if not given_up and mark.exists():
            given_up = True  # in this very step
            assert restarts or engine.version < 0
            assert max(written(stage)) < WRONG
        mover.step(stage.world.now)
        stage.world.advance(0.02)
        if len(stage.completed()) == 32:
            break
    assert given_up
    assert restarts == int(kind is WrongOnce)
    said = [record.getMessage() for record in caplog.records if "self-check of version" in record.getMessage()]
    assert any(f"self-check of version {WRONG}: probe" in text and "the trainer" in text for text in said)
    done = stage.completed()
    assert len(done) == 32
    assert max(written(stage)) >= WRONG
    assert worst(done.values(), policy.model) < 1e-4
    ledger = audit(stage.world.log, stage.world.codec, "run")
    assert ledger.balanced, ledger.violations


def test_d2_an_engine_process_that_goes_wrong_is_ended_and_the_next_one_passes(policy: Policy, tmp_path: Path) -> None:
    recipe = Recipe(
        factory=f"{WrongOnce.__module__}:{WrongOnce.__name__}",
        options={"path": str(policy.path), "mark": str(tmp_path / "wrong")},
    )
    engine = RemoteEngine(recipe, decoder=lambda: decimal)
    try:
        checking = Checking(engine, Shelf(policy.weights))
        assert checking.load(manifest_of(policy.model(1), 1))
        assert checking.most < 1e-4
        first = engine.pid
        with pytest.raises(EngineLost, match=rf"self-check of version {WRONG}: probe"):
            checking.load(manifest_of(policy.model(WRONG), WRONG))
        assert checking.engine.version == -1
        deadline = Deadline.after(120, "the engine starts anew")
        while not checking.engine.ready:
            deadline.check()
            assert checking.engine.poll(0.01) == []
        assert engine.pid != first
        assert checking.load(manifest_of(policy.model(WRONG), WRONG))
        assert checking.engine.version == WRONG
        assert checking.most < 1e-4
    finally:
        engine.close()
