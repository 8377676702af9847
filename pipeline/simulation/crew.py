"""Starts the real operators inside simulated processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.operators.operator import Context, Operator
from laminar.operators.prompts.operator import Prompts
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.operators.repack.operator import Repack
from laminar.operators.reward.operator import build as build_reward
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.operator import Trainer
from laminar.pipeline.simulation.disk import SimulatedDisk
from laminar.pipeline.simulation.engine import SimulatedEngine
from laminar.pipeline.simulation.learner import ListLearner
from laminar.pipeline.simulation.process import Process
from laminar.pipeline.simulation.relay import RelayEnd
from laminar.pipeline.simulation.scenario import SESSION_S
from laminar.streams.memory import MemoryLog

if TYPE_CHECKING:
    from laminar.pipeline.simulation.world import World

__all__ = ["Crew"]


class _Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text]}


class Crew:
    """See the module's docstring."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._makers: dict[str, Callable[[Process, Context], Operator]] = {
            "prompts": self._prompts,
            "repack": lambda _, context: Repack(world.scenario.repack(), context),
            "reward": lambda _, context: build_reward(world.scenario.reward(), context),
            "rollout": self._rollout,
            "trainer": self._trainer,
        }

    def learnt(self) -> list[str]:
        """What the newest checkpoint has learnt."""
        learner = ListLearner()
        Checkpoints(self._folder / "checkpoints", keep=1).load(learner)
        return learner.learnt

    def start(self, process: Process) -> None:
        """Build its operator. Raises what that raises."""
        world = self._world
        log = MemoryLog(
            clock=world.clock,
            broker=world.broker,
            faults=process.reach,
            session_timeout_s=SESSION_S,
            sleep=lambda seconds: world.wait(process, max(0.01, seconds)),
        )
        process.log = log
        context = Context(
            run=world.run,
            name=process.name,
            instance=process.instance,
            log=log,
            codec=world.codec,
            clock=world.clock,
            stopwatch=world.clock,
            rng=random.Random(f"{process.instance}/{world.clock.now}"),
        )
        process.operator = self._makers[process.name](process, context)

    def _prompts(self, process: Process, context: Context) -> Operator:
        del process
        return Prompts(self._world.scenario.prompts(self._folder), context, PromptTokenizer(_Letters(), 64))

    def _rollout(self, process: Process, context: Context) -> Operator:
        world = self._world
        process.engine = SimulatedEngine(
            world.scenario,
            world.clock,
            self._point(process),
            lambda version, busy: world.witness.loaded(process.instance, version, busy=busy),
        )
        weights = self._relay(process)
        return Rollout(world.scenario.rollout(), context, engine=process.engine, weights=weights)

    def _trainer(self, process: Process, context: Context) -> Operator:
        world = self._world
        disk = SimulatedDisk(self._point(process), self._pointed)
        return Trainer(
            world.scenario.trainer(),
            context,
            learner=ListLearner(),
            publisher=self._relay(process),
            checkpoints=Checkpoints(self._folder / "checkpoints", keep=1, disk=disk),
        )

    def _pointed(self, step: int) -> None:
        self._world.durable = step

    def _point(self, process: Process) -> Callable[[str], None]:
        return lambda point: self._world.point(process, point)

    def _relay(self, process: Process) -> RelayEnd:
        world = self._world
        return RelayEnd(
            world.relay,
            world.run.run_id,
            process.instance,
            world.clock,
            self._point(process),
            lambda seconds: world.wait(process, seconds),
        )
