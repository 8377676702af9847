"""A run that the operators themselves made over the memory log, with all that may befall one, kept as its records.

Every test may take records out, double or change them, and audit what is left.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

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
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Fenced, Retryable
from laminar.streams.audit.fold import Fold
from laminar.streams.audit.peek import Peek
from laminar.streams.audit.report import Reached, report
from laminar.streams.dead import Desk
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import LogRecord, TopicPartition
from laminar.streams.memory import MemoryLog
from laminar.streams.memory.broker import MemoryPartition
from laminar.streams.topics import topic_specs
from tests.support.dataflow import World
from tests.support.faults import Crash, Faults
from tests.support.training import CountingLearner
from tests.support.weights import NoWeights

__all__ = ["CachingPeek", "Recording", "RunOfAll", "recorded"]

STEPS, GROUP_SIZE, GROUPS_PER_STEP = 6, 4, 2


@dataclass(frozen=True)
class Recording:
    """The records of a run in the order in which they were written, and what its groups had committed."""

    records: tuple[LogRecord, ...]
    committed: Mapping[str, Mapping[TopicPartition, int]]
    world: World

    def decoded(self, record: LogRecord) -> r.Record:
        """What it says."""
        return _decoded(record.value or b"")

    def changed(self, record: LogRecord, value: r.Record) -> LogRecord:
        """The record with another value."""
        return replace(record, value=self.world.codec.encode(value))

    def ledger(self, records: Sequence[LogRecord], *, window: int = 16) -> Ledger:
        """The audit of these records, without a log. ``window``: see Fold."""
        fold = Fold(_PEEK, "run", window=window)
        for record in records:
            fold.apply(record)
        if fold.reopened:
            again = Fold(_PEEK, "run", only=fold.reopened)
            for record in records:
                again.apply(record)
            fold.restore(again, steps=False)
        return report(fold, self.reached(records))

    def reached(self, records: Sequence[LogRecord]) -> Reached:
        """Everything is read and settled."""
        ends: dict[TopicPartition, int] = {}
        for record in records:
            ends[record.source] = max(ends.get(record.source, 0), record.offset + 1)
        committed = {**self.committed["run.rollout"], **self.committed["run.reward"]}
        return Reached(ends=ends, committed=committed, trainer=self.committed["run.trainer"])

    def log(self, records: Sequence[LogRecord]) -> MemoryLog:
        """A log with exactly these records at their offsets."""
        log = MemoryLog()
        log.create_topics(topic_specs())
        by_partition: dict[TopicPartition, list[LogRecord]] = {}
        for record in records:
            by_partition.setdefault(record.source, []).append(record)
        for partition, kept in by_partition.items():
            kept.sort(key=lambda one: one.offset)
            log.broker.partitions[partition] = MemoryPartition(kept, 0, kept[-1].offset + 1)
        log.broker.offsets.update({group: dict(offsets) for group, offsets in self.committed.items()})
        return log


_CODEC = Codec()


@cache
def _decoded(value: bytes) -> r.Record:
    return _CODEC.decode(value)


class CachingPeek(Peek):
    """Reads each value once."""

    def __init__(self) -> None:
        super().__init__(_CODEC)
        self._seen: dict[tuple[bytes, str], object] = {}

    def read(self, value: bytes, topic: str) -> object:
        """See Peek.read."""
        if (value, topic) not in self._seen:
            self._seen[value, topic] = super().read(value, topic)
        return self._seen[value, topic]


_PEEK = CachingPeek()


class _Letters:
    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 96 for c in text]}


def _script(request: EngineRequest) -> Answer:
    rng = random.Random(request.trajectory_id)
    ids = tuple(rng.randrange(5, 200) for _ in range(rng.choice([3, 6, 12, 40])))
    if request.trajectory_id.endswith(("/1/3", "/7/2")):
        return Answer(ids=ids, fail_times=9)  # becomes a dead letter
    return Answer(ids=ids)


class RunOfAll:
    """Every operator of a run in one process, under a clock that only ``turn`` moves."""

    def __init__(self, folder: Path) -> None:
        self.world = World(groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, steps=STEPS, max_staleness=2)
        self.folder = folder
        self.faults = Faults(random.Random(0), 0.0)
        self.data = PromptsConfig(train=self._dataset("train", 20), eval=self._dataset("eval", 4))
        self.running: dict[str, Operator] = {}
        for instance in ("prompts-0", "rollout-0", "rollout-1", "reward-0", "repack-0", "trainer-0"):
            self.start(instance)

    def _dataset(self, name: str, rows: int) -> DataConfig:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": "abc", "answer": str(i)}) + "\n" for i in range(rows)))
        return DataConfig(path=path)

    def start(self, instance: str) -> None:
        self.world.advance(0.002)
        context = self.world.context(instance.rsplit("-", 1)[0])
        assert isinstance(self.world.log, MemoryLog)
        log = MemoryLog(clock=context.clock, broker=self.world.log.broker, faults=self.faults, session_timeout_s=5.0)
        self.running[instance] = self._make(replace(context, instance=instance, log=log))

    def _make(self, context: Context) -> Operator:
        match context.name:
            case "prompts":
                return Prompts(self.data, context, PromptTokenizer(_Letters(), 512))
            case "rollout":
                config = RolloutConfig(poll_s=0.0, finish_s=0.0, delta_s=0.1, heartbeat_s=0.5, lease_s=3.0)
                return Rollout(config, context, engine=ScriptedEngine(_script, max_running=12), weights=NoWeights())
            case "reward":
                return build_reward(RewardConfig(), context)
            case "repack":
                return Repack(RepackConfig(period_s=1.0, dead_after_s=3.0, version_wait_s=2.0), context)
            case _:
                return Trainer(
                    TrainerConfig(algorithm=AlgorithmConfig(zero_advantage="keep", min_group=1), publish_retry_s=0.3),
                    context,
                    learner=CountingLearner(),
                    publisher=NoWeights(),
                    checkpoints=Checkpoints(self.folder / "checkpoints", keep=1),
                )

    def turn(self) -> None:
        """Each operator makes a step; one that fails is started again."""
        self.world.advance(0.02)
        for instance, operator in list(self.running.items()):
            try:
                operator.step(self.world.now)
            except (Retryable, Fenced, Crash) as error:
                if not isinstance(error, Crash):
                    operator.close()
                self.start(instance)

    def until(self, holds: Callable[[], bool], rounds: int = 4000) -> None:
        """Turn until it holds."""
        for _ in range(rounds):
            if holds():
                return
            self.turn()
        raise AssertionError("it never came to that")

    def kill(self, instance: str) -> None:
        """It says nothing any more, and a successor has no part in what it held."""
        del self.running[instance]


@cache
def recorded() -> Recording:
    """A finished run: two rollouts, one of them killed and followed; a drained one; a trainer that died between a
    step's record and its checkpoint; dead letters, one retried, one dropped; two evaluation rounds."""
    with TemporaryDirectory() as folder:
        run = RunOfAll(Path(folder))
        read = run.world.read
        run.until(lambda: len(read("training.steps", r.TrainingStep)) >= 1)
        held = _sampling(run)
        run.until(lambda: bool(held()["rollout-0"]))
        run.kill("rollout-0")
        run.until(lambda: any(m.reason == "dead" for m in read("trajectories.partial", r.TrajectoryMoved)))
        run.start("rollout-0")
        run.until(lambda: len(read("training.steps", r.TrainingStep)) >= 2 and bool(held()["rollout-1"]))
        run.running["rollout-1"].drain(run.world.now)
        run.kill("rollout-1")
        run.start("rollout-1")
        run.until(lambda: len(read("training.steps", r.TrainingStep)) >= 3)
        _fail_the_next_checkpoint(run)
        run.until(lambda: len(read("training.steps", r.TrainerStarted)) >= 2)
        run.until(lambda: len(read("dead.letters", r.DeadLetter)) >= 2)
        _decide(run)
        run.until(lambda: bool(read("training.steps", r.RunEnded)))
        broker = run.world.log.broker  # type: ignore[attr-defined]
        everything = [record for partition in broker.partitions.values() for record in partition.records]
        everything.sort(key=lambda one: (one.timestamp_ms, one.topic, one.partition, one.offset))
        committed = {group: dict(offsets) for group, offsets in broker.offsets.items()}
        return Recording(tuple(everything), committed, run.world)


def _sampling(run: RunOfAll) -> Callable[[], dict[str, Iterable[str]]]:
    def held() -> dict[str, Iterable[str]]:
        return {
            name: [one.trajectory_id for one in operator._work.ledger if one.n_settled]  # type: ignore[attr-defined]
            for name, operator in run.running.items()
            if name.startswith("rollout")
        }

    return held


def _fail_the_next_checkpoint(run: RunOfAll) -> None:
    trainer = run.running["trainer-0"]

    def dies() -> None:
        raise Crash

    trainer._save = dies  # type: ignore[attr-defined]


def _decide(run: RunOfAll) -> None:
    assert isinstance(run.world.log, MemoryLog)
    with closing(
        Desk(
            run.world.log,
            run.world.codec,
            "run",
            by="test@here",
            deadline=Deadline.after(30, "decide", lambda: run.world.now),
            clock=lambda: run.world.now,
        )
    ) as desk:
        first, second, *_ = sorted(desk.register.entries.values(), key=lambda one: one.place)
        desk.drop(first)
        desk.retry(second)
