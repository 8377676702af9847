"""All operators of a run in one process over the memory log, under a virtual clock; a seed says who crashes when.

Crashes fall before, inside and after transactions; operators pause for longer than their sessions and wake up as
zombies. At the end every admitted member has one fate, by the audit, and every operator's own rules were kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.operators.operator import Context, Operator
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.operator import build as build_reward
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import AlgorithmConfig, TrainerConfig
from laminar.operators.trainer.operator import Trainer
from laminar.operators.trainer.selection import Batch
from laminar.operators.weights import NamedTensor
from laminar.schemas import records as r
from laminar.schemas.errors import Fenced, Retryable
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline
from laminar.streams.memory import MemoryLog
from tests.support.dataflow import World, make_prompt
from tests.support.faults import Crash, Faults
from tests.support.weights import NoWeights

GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 24, 4, 3


class Counting:
    """A Learner whose weights are the number of its steps."""

    identity = "counting"
    tied: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.steps = 0

    def begin(self, batch: Batch, step: int) -> None:
        assert step == self.steps + 1

    def advance(self) -> bool:
        return False

    def finish(self) -> Mapping[str, float]:
        self.steps += 1
        return {}

    def abandon(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        (folder / "steps").write_text(str(self.steps))

    def load(self, folder: Path) -> None:
        self.steps = int((folder / "steps").read_text())

    def tensors(self) -> Iterable[NamedTensor]:
        return ()


def script(request: EngineRequest) -> Answer:
    rng = random.Random(request.seed)
    ids = tuple(rng.randrange(5, 200) for _ in range(rng.choice([3, 6, 12, 24])))
    if rng.random() < 0.05:
        return Answer(ids=ids, fail_times=9)  # becomes a dead letter
    if rng.random() < 0.05:
        return Answer(ids=ids, reject="the prompt is not to its taste")
    return Answer(ids=ids)


class Run:
    """Who runs, who is paused until when, and how to start each of them again."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.world = World(groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, steps=10**6)
        self.faults = Faults(self.rng, 0.1)
        self.folder = folder
        self.weights = NoWeights()
        self.makers: dict[str, Callable[[Context], Operator]] = {
            "rollout-0": self.rollout,
            "rollout-1": self.rollout,
            "reward-0": lambda context: build_reward(RewardConfig(max_in_hand=8), context),
            "repack-0": lambda context: Repack(
                RepackConfig(period_s=1.0, dead_after_s=3.0, version_wait_s=2.0), context
            ),
            "trainer-0": self.trainer,
        }
        self.paused: dict[str, float] = {}
        self.running = {name: self.make(name) for name in self.makers}
        self.crashes = 0

    def make(self, instance: str) -> Operator:
        context = self.world.context(instance.rsplit("-", 1)[0])
        assert isinstance(self.world.log, MemoryLog)
        self.world.advance(0.002)  # an incarnation is a time in milliseconds
        log = MemoryLog(clock=context.clock, broker=self.world.log.broker, faults=self.faults, session_timeout_s=5.0)
        return self.makers[instance](replace(context, instance=instance, log=log))

    def rollout(self, context: Context) -> Operator:
        config = RolloutConfig(
            poll_s=0.0, finish_s=0.0, delta_s=0.1, heartbeat_s=0.5, lease_s=3.0, top_up_lag=4, max_in_flight=12
        )
        engine = ScriptedEngine(script, max_running=12)
        return Rollout(config, context, engine=engine, weights=self.weights)

    def trainer(self, context: Context) -> Operator:
        return Trainer(
            TrainerConfig(final_evaluation=False, algorithm=AlgorithmConfig(zero_advantage="keep")),
            context,
            learner=Counting(),
            publisher=self.weights,
            checkpoints=Checkpoints(self.folder, keep=1),
        )

    def step(self, faulty: bool) -> None:
        self.world.advance(self.rng.choice([0.01, 0.02, 0.05]))
        for name in self.running:
            if self.paused.get(name, 0.0) > self.world.now:
                continue
            if faulty and self.rng.random() < 0.001:
                self.paused[name] = self.world.now + self.rng.choice([1.0, 8.0])
                continue
            try:
                self.running[name].step(self.world.now)
            except (Retryable, Fenced, Crash) as error:
                self.crashes += 1
                if not isinstance(error, Crash):
                    self.running[name].close()
                self.running[name] = self.make(name)

    def ended(self) -> bool:
        return bool(self.world.read("training.steps", r.RunEnded))

    def until(self, holds: Callable[[], bool], *, faulty: bool, rounds: int) -> bool:
        for number in range(rounds):
            self.step(faulty)
            if number % 50 == 0 and holds():
                return True
        return holds()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_b1_b15_whoever_crashes_every_member_has_one_fate(seed: int, tmp_path: Path) -> None:
    run = Run(seed, tmp_path)
    run.world.write(*[make_prompt(index, group_size=GROUP_SIZE) for index in range(GROUPS)])
    run.world.write(r.DataExhausted(run_id="run", groups=GROUPS, at_ms=0))
    if not run.until(run.ended, faulty=True, rounds=1_500):
        run.faults.rate = 0.0
        assert run.until(run.ended, faulty=False, rounds=6_000)
    ledger = audit(run.world.log, run.world.codec, "run", deadline=Deadline.after(60, "audit"))
    assert ledger.violations == ()
    assert ledger.admitted == GROUPS * GROUP_SIZE
    assert ledger.trained + sum(ledger.dropped.values()) + ledger.dead == ledger.admitted, ledger.as_json()
    assert ledger.max_versions_per_trajectory == 1
    assert ledger.trained > 0
    assert run.crashes > 5
