"""A trainer over the memory log whose learner only counts: everything but the arithmetic is real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import CheckpointConfig, TrainerConfig
from laminar.operators.trainer.operator import Trainer
from laminar.operators.trainer.selection import Batch
from laminar.operators.weights import NamedTensor
from laminar.schemas import records as r
from laminar.schemas.errors import Retryable
from laminar.streams.deadline import Deadline
from tests.support.dataflow import World, make_prompt, make_tokens

__all__ = ["CountingLearner", "Publisher", "TrainerRun", "dead", "eval_prompt", "group", "scored"]


def scored(
    prompt: r.Prompt, member: int = 0, reward: float | None = None, *, version: int = 0, attempt: int = 0, n: int = 3
) -> r.ScoredTrajectory:
    """One answer. The reward is 1 for even members and 0 for odd ones unless given."""
    value = float(member % 2 == 0) if reward is None else reward
    return r.ScoredTrajectory(
        trajectory=r.CompletedTrajectory(
            trajectory_id=r.trajectory_id(prompt.prompt_id, member),
            group_id=prompt.prompt_id,
            member=member,
            attempt=attempt,
            prompt=prompt,
            response=make_tokens(n, version=version),
            text="x",
            finish="stop",
            rollout_id="rollout-0",
            engine="scripted",
            seed=0,
            version_min=version,
            version_max=version,
            timings=r.Timings(),
        ),
        reward=value,
        function="exact",
        latency_ms=0.1,
        scored_ms=0,
    )


def group(index: int, size: int = 4, *, version: int = 0, epoch: int = 0) -> list[r.ScoredTrajectory]:
    """All members of a training group."""
    prompt = make_prompt(index, prompt_id=f"d/{epoch}/{index}", epoch=epoch, group_size=size)
    return [scored(prompt, member, version=version) for member in range(size)]


def eval_prompt(number: int, index: int, size: int) -> r.Prompt:
    """A prompt of evaluation round ``number``, which has ``size`` of them."""
    return make_prompt(
        index,
        prompt_id=f"eval-d/{number}/{index}",
        dataset="eval-d",
        epoch=number,
        purpose="eval",
        group_size=1,
        round_size=size,
    )


def dead(*trajectory_ids: str) -> r.DeadLetter:
    """A letter that settles these members."""
    return r.DeadLetter(
        operator="rollout-0",
        kind="InvalidRequest",
        error="too long",
        topic="prompts",
        partition=0,
        offset=0,
        attempt=1,
        key=None,
        value=None,
        trajectory_ids=trajectory_ids,
        at_ms=0,
    )


class CountingLearner:
    """Its weights are the list of trajectories that it was trained on."""

    def __init__(self, identity: str = "counting/1") -> None:
        self.identity = identity
        self.tied: Mapping[str, str] = {}
        self.learnt: list[str] = []
        self.batches: list[Batch] = []
        self._batch: Batch | None = None

    def begin(self, batch: Batch, step: int) -> None:
        del step
        self._batch = batch

    def advance(self) -> bool:
        return False

    def finish(self) -> Mapping[str, float]:
        assert self._batch is not None
        self.batches.append(self._batch)
        self.learnt += [s.trajectory.trajectory_id for s in self._batch.samples]
        self._batch = None
        return {"loss": 0.0}

    def abandon(self) -> None:
        self._batch = None

    def save(self, folder: Path) -> None:
        (folder / "learner.json").write_text(json.dumps(self.learnt))

    def load(self, folder: Path) -> None:
        self.learnt = json.loads((folder / "learner.json").read_text())

    def tensors(self) -> Iterator[NamedTensor]:
        data = len(self.learnt).to_bytes(4, "little")
        yield NamedTensor(name="count", dtype="I32", shape=(1,), data=memoryview(data))

    def probes(self) -> tuple[r.Probe, ...]:
        return ()


class Publisher:
    """A relay that holds what was staged; ``fail`` makes it refuse."""

    def __init__(self) -> None:
        self.fail: Callable[[], Retryable] | None = None
        self.sealed: dict[int, int] = {}
        """Version -> trajectories behind it."""
        self._staged: dict[int, int] = {}

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
        del deadline
        if self.fail is not None:
            raise self.fail()
        (tensor,) = tensors
        self._staged[version] = int.from_bytes(tensor.data, "little")
        return r.VersionManifest(
            run_id="run",
            epoch=epoch,
            version=version,
            parent=parent,
            step=step,
            state="prepared",
            tensors=(r.TensorEntry(name="count", dtype="I32", shape=(1,), offset=0, size=4),),
            total_bytes=4,
            chunk_bytes=4,
            chunk_digests=bytes(8),
            root_digest="0",
            tied=tied,
            relay_id="relay-0",
            relay_url="http://127.0.0.1:1",
            relay_boot="b",
            at_ms=0,
        )

    def seal(self, manifest: r.VersionManifest, deadline: Deadline) -> r.VersionManifest:
        del deadline
        self.sealed[manifest.version] = self._staged.pop(manifest.version)
        values = {f: getattr(manifest, f) for f in manifest.__dataclass_fields__}
        return r.VersionManifest(**{**values, "state": "committed"})


class TrainerRun:
    """A log, a folder of checkpoints and trainers, one after the other."""

    def __init__(self, folder: Path, *, steps: int = 10, max_staleness: int | None = None, **config: Any) -> None:
        self.world = World(groups_per_step=2, group_size=4, steps=steps, max_staleness=max_staleness)
        self.folder = folder / "checkpoints"
        settings = {"checkpoint": CheckpointConfig(folder=self.folder), **config}
        self.config = TrainerConfig(**settings)
        self.publisher = Publisher()
        self.learner = CountingLearner()
        self.trainer: Trainer | None = None

    def start(self, *, checkpoints: Checkpoints | None = None, learner: CountingLearner | None = None) -> Trainer:
        """A new trainer process; what the one before held in memory is gone."""
        self.learner = learner or CountingLearner()
        self.trainer = Trainer(
            self.config,
            self.world.context("trainer"),
            learner=self.learner,
            publisher=self.publisher,
            checkpoints=checkpoints,
        )
        return self.trainer

    def settle(self, limit: int = 1000) -> None:
        """Step until there is nothing to do."""
        assert self.trainer is not None
        for _ in range(limit):
            if not self.trainer.step(self.world.now):
                return
        raise AssertionError("the trainer does not come to rest")

    def feed(self, groups: Sequence[int], *, version: int = 0) -> None:
        """Write whole training groups and let the trainer work on them."""
        for index in groups:
            self.world.write(*group(index, version=version))
        self.settle()

    @property
    def steps(self) -> list[r.TrainingStep]:
        """Every TrainingStep on the log."""
        return self.world.read("training.steps", r.TrainingStep)

    @property
    def ended(self) -> list[str]:
        """Reasons of RunEnded."""
        return [e.reason for e in self.world.read("training.steps", r.RunEnded)]

    @property
    def committed(self) -> list[int]:
        """Committed versions in order."""
        return [m.version for m in self.world.read("weights.versions", r.VersionManifest) if m.state == "committed"]
