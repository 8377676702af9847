"""Every operator of a run in one process, over any log: real but for the engine, the weights and the arithmetic."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from laminar.operators.operator import Context, ModelConfig, Operator, RunInfo
from laminar.operators.prompts.config import DataConfig, PromptsConfig
from laminar.operators.prompts.operator import Prompts
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.operators.relay.directory import RelayDirectory
from laminar.operators.relay.versions import VersionFollower
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import AlgorithmConfig, TrainerConfig
from laminar.operators.trainer.operator import Trainer
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import InvalidRecord
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log, OutRecord
from laminar.streams.loop import Loop
from laminar.streams.memory import MemoryLog
from laminar.streams.reading import decoded, read_topic
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Inline
from tests.support.training import CountingLearner
from tests.support.weights import NoWeights

T = TypeVar("T")

__all__ = ["Crew"]


class _Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 96 for c in text]}


class _Followers:
    """What a relay reads: versions and its peers."""

    def __init__(self, context: Context) -> None:
        self._versions = VersionFollower(context)
        self._relays = RelayDirectory(context)

    def step(self, now: float) -> bool:
        del now
        self._relays.refresh()
        return self._versions.poll()

    def drain(self, now: float) -> bool:
        del now
        return True

    def close(self) -> None:
        self._versions.close()
        self._relays.close()


class Crew:
    """Start it with ``go``; ``broken_reward`` and ``answer`` may be changed at any time."""

    def __init__(
        self,
        folder: Path,
        *,
        log: Log | None = None,
        steps: int = 3,
        groups_per_step: int = 2,
        group_size: int = 4,
        epochs: int | None = None,
        rows: int = 50,
        eval_rows: int = 0,
        codec: Codec | None = None,
        partitions: int = 8,
    ) -> None:
        """Without a log: a memory log under a clock that only ``go`` moves. ``partitions``: of topics with several."""
        self.virtual = log is None
        self.now = 1_000_000.0 if self.virtual else time.time()
        self.log = log or MemoryLog(clock=self.clock)
        specs = topic_specs()
        self.log.create_topics([s if s.partitions == 1 else replace(s, partitions=partitions) for s in specs])
        self.codec = codec or Codec()
        self.folder = folder
        self.broken_reward = False
        self.answer: Callable[[EngineRequest], Answer] = lambda request: Answer(
            ids=tuple(random.Random(request.seed).randrange(5, 200) for _ in range(6))
        )
        self.learner = CountingLearner()
        self._info = RunInfo(
            run_id="run",
            run_dir=folder,
            steps=steps,
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=None,
            seed=0,
            model=ModelConfig(path=Path("model")),
        )
        self._data = PromptsConfig(
            train=self._dataset("train.jsonl", rows),
            eval=self._dataset("eval.jsonl", eval_rows) if eval_rows else None,
            epochs=epochs,
        )
        self.running: dict[str, Operator] = {}
        for instance in ("relay-0", "prompts-0", "rollout-0", "reward-0", "repack-0", "trainer-0"):
            self.start(instance)

    def clock(self) -> float:
        return self.now if self.virtual else time.time()

    def start(self, instance: str) -> None:
        """A new process; the one before is closed."""
        if instance in self.running:
            self.running[instance].close()
        self.now += 0.002  # an incarnation is a time in milliseconds
        name = instance.rsplit("-", 1)[0]
        context = Context(
            run=self._info, name=name, instance=instance, log=self.log, codec=self.codec, clock=self.clock
        )
        self.running[instance] = self._make(context)

    def close(self) -> None:
        for operator in self.running.values():
            operator.close()

    def resize(self, *, steps: int) -> None:
        """For processes that are started from now on."""
        self._info = replace(self._info, steps=steps)

    def go(self, until: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Step everybody until it holds. Fails when it takes longer than so many seconds of the crew's clock."""
        deadline = Deadline.after(seconds, "the crew gets there", self.clock)
        while not until():
            deadline.check()
            for _ in range(25):
                worked = [operator.step(self.clock()) for operator in self.running.values()]
                if self.virtual:
                    self.now += 0.02
                elif not any(worked):
                    time.sleep(0.005)

    def rest(self, seconds: float) -> None:
        """Let everybody work for so long."""
        end = self.clock() + seconds
        self.go(lambda: self.clock() >= end, seconds=seconds + 60)

    def write(self, *records: OutRecord | r.Record) -> None:
        """Commit these, as somebody from outside."""
        producer = self.log.producer("outside")
        with producer.transaction() as tx:
            for record in records:
                tx.send(record if isinstance(record, OutRecord) else outgoing(self.codec, record))
        producer.close()

    def read(self, topic: str, kind: type[T]) -> list[T]:
        """All records of a type on a topic."""
        records = read_topic(self.log, topic, Deadline.after(60, f"read {topic}"))
        return [event for _, event in decoded(records, self.codec) if isinstance(event, kind)]

    def steps_done(self) -> int:
        return max((s.step for s in self.read("training.steps", r.TrainingStep)), default=0)

    def ended(self) -> bool:
        starts = [type(e) for e in self.read("training.steps", r.TrainerStarted | r.RunEnded)]  # type: ignore[arg-type]
        return starts[-1:] == [r.RunEnded]

    def letters(self) -> list[r.DeadLetter]:
        return self.read("dead.letters", r.DeadLetter)

    def fates(self) -> dict[str, str]:
        """Member -> trained, or the reason why it was dropped."""
        found: dict[str, str] = {}
        for step in self.read("training.steps", r.TrainingStep):
            found |= dict.fromkeys(step.trained, "trained")
            found |= {one.trajectory_id: one.reason for one in step.dropped}
        return found

    def ledger(self) -> Ledger:
        return audit(self.log, self.codec, "run", deadline=Deadline.after(60, "audit"))

    def _dataset(self, name: str, rows: int) -> DataConfig:
        path = self.folder / name
        path.write_text("".join(json.dumps({"prompt": "abc", "answer": str(i)}) + "\n" for i in range(rows)))
        return DataConfig(path=path)

    def _make(self, context: Context) -> Operator:
        match context.name:
            case "relay":
                return _Followers(context)
            case "prompts":
                return Prompts(self._data, context, PromptTokenizer(_Letters(), 512))
            case "rollout":
                config = RolloutConfig(
                    poll_s=0.0, finish_s=0.0, delta_s=0.1, heartbeat_s=0.5, lease_s=3.0 if self.virtual else 60.0
                )
                engine = ScriptedEngine(lambda request: self.answer(request), max_running=12)
                return Rollout(config, context, engine=engine, weights=NoWeights())
            case "reward":
                return Loop(
                    log=context.log,
                    codec=context.codec,
                    name=context.name,
                    group=context.group,
                    instance=context.instance,
                    transactional_id=context.transactional_id,
                    topics=["trajectories.completed"],
                    worker=Inline(self._score),
                )
            case "repack":
                return Repack(
                    RepackConfig(
                        period_s=1.0, dead_after_s=3.0 if self.virtual else 60.0, version_wait_s=2.0, enabled=False
                    ),
                    context,
                )
            case _:
                return Trainer(
                    TrainerConfig(algorithm=AlgorithmConfig(zero_advantage="keep"), publish_retry_s=0.3),
                    context,
                    learner=self.learner,
                    publisher=NoWeights(),
                    checkpoints=Checkpoints(self.folder / "checkpoints", keep=1),
                )

    def _score(self, record: r.Record) -> Sequence[r.Record]:
        if not isinstance(record, r.CompletedTrajectory):
            raise InvalidRecord(f"a {type(record).__name__} cannot be scored (valid: CompletedTrajectory)")
        if self.broken_reward:
            raise ZeroDivisionError("the reward function is broken")
        return [
            r.ScoredTrajectory(
                trajectory=record,
                reward=float(record.member % 2),
                function="test",
                latency_ms=0.0,
                scored_ms=int(self.clock() * 1000),
            )
        ]
