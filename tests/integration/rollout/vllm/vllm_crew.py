"""Every operator of a run in one process, with rollouts that sample with vLLM under the weights of a real model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.operators.operator import Context, Operator
from laminar.operators.prompts.config import DataConfig, PromptsConfig, SamplingConfig
from laminar.operators.prompts.operator import Prompts
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import AlgorithmConfig, TrainerConfig
from laminar.operators.trainer.operator import Trainer
from laminar.operators.weights import TensorView
from laminar.schemas import records as r
from laminar.streams.deadline import Deadline
from tests.integration.rollout.vllm.conftest import VOCAB
from tests.support.crew import Crew
from tests.support.weights import NoWeights

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

__all__ = ["Lent", "Versions", "VllmCrew"]

LEASE_S = 30.0
"""Of the crew's own clock, half a second of which passes in 25 turns, however long they take."""


class Lent:
    """An engine that outlives the operator that works with it. ``change`` may alter what it says."""

    def __init__(self, engine: VllmEngine, change: Callable[[Delta], Delta] | None = None) -> None:
        self._engine = engine
        self.change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def poll(self, timeout_s: float) -> list[Delta]:
        deltas = self._engine.poll(timeout_s)
        return deltas if self.change is None else [self.change(delta) for delta in deltas]

    def close(self) -> None:
        for name in list(self._engine._rows):
            self._engine.abort(name)


class Versions(NoWeights):
    """Any number of versions, in memory."""

    def __init__(self, of: Callable[[int], Mapping[str, TensorView]]) -> None:
        self.of = of

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        yield self.of(manifest.version)


class _Letters:
    """A tokenizer of one token a letter, none of them special."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [4 + (ord(c) - 97) % (VOCAB - 4) for c in text]}


class VllmCrew(Crew):
    """``engines``: of each rollout by its instance. ``prompts``: the dataset, in the order of admission."""

    def __init__(
        self,
        folder: Path,
        *,
        engines: Mapping[str, Lent],
        weights: Callable[[int], Mapping[str, TensorView]],
        prompts: list[str],
        sampling: SamplingConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        rollout: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> None:
        self._engines = engines
        self._weights = Versions(weights)
        self._prompts = prompts
        self._algorithm = algorithm or AlgorithmConfig(zero_advantage="keep")
        self._rollout = rollout or {}
        self._sampling = sampling or SamplingConfig(max_tokens=24)
        super().__init__(folder, **how)
        for instance in engines:
            if instance not in self.running:
                self.start(instance)

    def trajectories(self) -> dict[str, r.CompletedTrajectory]:
        """What is on the topic of finished ones."""
        return {one.trajectory_id: one for one in self.read("trajectories.completed", r.CompletedTrajectory)}

    def _dataset(self, name: str, rows: int) -> DataConfig:
        path = self.folder / name
        lines = [json.dumps({"prompt": text, "answer": str(i)}) + "\n" for i, text in enumerate(self._prompts)]
        path.write_text("".join(lines))
        return DataConfig(path=path)

    def _make(self, context: Context) -> Operator:
        match context.name:
            case "prompts":
                config = PromptsConfig(
                    train=self._data.train,
                    epochs=self._data.epochs,
                    shuffle=False,
                    sampling=self._sampling,
                    too_long="dead_letter",
                )
                return Prompts(config, context, PromptTokenizer(_Letters(), 512))
            case "rollout":
                settings = {
                    "poll_s": 0.0, "finish_s": 0.0, "delta_s": 0.1, "heartbeat_s": 0.5, "lease_s": LEASE_S,
                    **self._rollout,
                }  # fmt: skip
                engine: Any = self._engines[context.instance]
                return Rollout(RolloutConfig(**settings), context, engine=engine, weights=self._weights)
            case "repack":
                repack = RepackConfig(period_s=1.0, dead_after_s=LEASE_S, version_wait_s=2.0, enabled=False)
                return Repack(repack, context)
            case "trainer":
                return Trainer(
                    TrainerConfig(algorithm=self._algorithm, publish_retry_s=0.3),
                    context,
                    learner=self.learner,
                    publisher=self._weights,
                    checkpoints=Checkpoints(self.folder / "checkpoints", keep=1),
                )
            case _:
                return super()._make(context)
