"""Bounded staleness with every operator at work: the run gets on, and nothing that was sampled is thrown away as stale.

One process, the memory log, a virtual clock. Publishing takes a while, as it does in life: between a step's record and
its committed version lies time in which nothing may be admitted that could only be sampled with the old version.
Who crashes is left to the simulation (``tests/chaos/simulation``); there the trainer's new epochs cost versions.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.operators.operator import Context, Operator
from laminar.operators.prompts.config import DataConfig, PromptsConfig
from laminar.operators.prompts.operator import Prompts
from laminar.operators.prompts.tokenizing import PromptTokenizer
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
from laminar.operators.weights import NamedTensor
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline
from laminar.streams.memory import MemoryLog
from tests.support.dataflow import World
from tests.support.training import CountingLearner
from tests.support.weights import NoWeights

STEPS = 8


class SlowWeights(NoWeights):
    """The relay takes each version at the second attempt only."""

    def __init__(self) -> None:
        self.refused: set[int] = set()

    def stage(
        self,
        tensors: Iterable[NamedTensor],
        *,
        tied: Mapping[str, str],
        epoch: int,
        version: int,
        parent: int,
        step: int,
        deadline: Deadline,
    ) -> r.VersionManifest:
        if version not in self.refused:
            self.refused.add(version)
            raise Unavailable("busy")
        return super().stage(
            tensors, tied=tied, epoch=epoch, version=version, parent=parent, step=step, deadline=deadline
        )


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 96 for c in text]}


def script(request: EngineRequest) -> Answer:
    rng = random.Random(request.seed)
    return Answer(ids=tuple(rng.randrange(5, 200) for _ in range(rng.choice([3, 6, 12, 60]))))


def dataset(folder: Path, name: str, rows: int) -> DataConfig:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": "abc", "answer": str(i)}) + "\n" for i in range(rows)))
    return DataConfig(path=path)


class Run:
    """Every operator of a run, in one process."""

    def __init__(self, folder: Path, *, groups_per_step: int, max_staleness: int, steps: int = STEPS) -> None:
        self.world = World(groups_per_step=groups_per_step, group_size=4, steps=steps, max_staleness=max_staleness)
        self.folder = folder
        self.data = PromptsConfig(train=dataset(folder, "train.jsonl", 5), eval=dataset(folder, "eval.jsonl", 4))
        self.running: dict[str, Operator] = {}
        for instance in ("prompts-0", "rollout-0", "rollout-1", "reward-0", "repack-0", "trainer-0"):
            self.start(instance)

    def start(self, instance: str) -> None:
        """A new process."""
        self.world.advance(0.002)  # an incarnation is a time in milliseconds
        context = self.world.context(instance.rsplit("-", 1)[0])
        assert isinstance(self.world.log, MemoryLog)
        log = MemoryLog(clock=context.clock, broker=self.world.log.broker, session_timeout_s=5.0)
        context = replace(context, instance=instance, log=log)
        self.running[instance] = self._make(context)

    def _make(self, context: Context) -> Operator:
        match context.name:
            case "prompts":
                return Prompts(self.data, context, PromptTokenizer(Letters(), 512))
            case "rollout":
                config = RolloutConfig(poll_s=0.0, finish_s=0.0, delta_s=0.1, heartbeat_s=0.5, lease_s=3.0)
                return Rollout(config, context, engine=ScriptedEngine(script, max_running=12), weights=NoWeights())
            case "reward":
                return build_reward(RewardConfig(), context)
            case "repack":
                return Repack(RepackConfig(period_s=1.0, dead_after_s=3.0, version_wait_s=2.0), context)
            case _:
                return Trainer(
                    TrainerConfig(algorithm=AlgorithmConfig(zero_advantage="keep"), publish_retry_s=0.3),
                    context,
                    learner=CountingLearner(),
                    publisher=SlowWeights(),
                    checkpoints=Checkpoints(self.folder / "checkpoints", keep=1),
                )

    def until_the_end(self, seconds: float) -> None:
        until = self.world.now + seconds
        while self.world.now < until and not self.world.read("training.steps", r.RunEnded):
            for _ in range(25):
                self.world.advance(0.02)
                for operator in self.running.values():
                    operator.step(self.world.now)

    @property
    def steps(self) -> list[r.TrainingStep]:
        return self.world.read("training.steps", r.TrainingStep)


@pytest.mark.parametrize("groups_per_step", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a12_a_bounded_run_gets_on_and_drops_nothing_as_stale(
    max_staleness: int, groups_per_step: int, tmp_path: Path
) -> None:
    run = Run(tmp_path, groups_per_step=groups_per_step, max_staleness=max_staleness)
    run.until_the_end(120.0)
    assert [s.step for s in run.steps] == list(range(1, STEPS + 1))
    assert Counter(d.reason for s in run.steps for d in s.dropped) == {}
    assert max(int(lag) for s in run.steps for lag in s.staleness) <= max_staleness
    assert [(e.round, e.n) for e in run.world.read("training.steps", r.Evaluation)] == [(0, 4), (STEPS, 4)]
    ledger = audit(run.world.log, run.world.codec, "run", deadline=Deadline.after(60, "audit"))
    assert ledger.violations == ()
