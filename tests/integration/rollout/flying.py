"""Rollouts that get new weights again and again, and what must hold of every token that they sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.loss import token_logprobs
from laminar.operators.weights import TensorView
from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens, ids_buffer, ids_view
from laminar.streams.deadline import Deadline
from tests.support import sample
from tests.support.dataflow import make_prompt
from tests.support.weights import NoWeights
from tests.unit.operators.rollout.stage import Stage

__all__ = ["Shelf", "complete", "prompts", "publish", "stage_with", "trainer_logprobs", "worst"]


class Shelf(NoWeights):
    """Any number of versions, in memory. Those ``coming`` are on their way."""

    def __init__(self, of: Callable[[int], Mapping[str, TensorView]]) -> None:
        self.of = of
        self.coming: set[int] = set()
        self.missing: set[int] = set()

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        yield self.of(manifest.version)

    def fetch(self, newest: r.VersionManifest) -> r.VersionManifest | None:
        return None if newest.version in self.coming else newest


def stage_with(of: Callable[[int], Mapping[str, TensorView]]) -> Stage:
    """A memory log with every topic; the weights of version 0 are published."""
    made = Stage()
    made.weights = Shelf(of)  # type: ignore[assignment]
    publish(made, 0)
    return made


def publish(stage: Stage, version: int) -> None:
    """A trainer starts with version 0, and makes the others in steps that train on nothing."""
    now = sample.training_step(version, metrics={}) if version else sample.trainer_started(version=0)
    stage.world.write(now)
    stage.publish(version, state="prepared")
    stage.publish(version)


def prompts(
    stage: Stage, ids: Sequence[Sequence[int]], *, max_tokens: int, first: int = 0, group_size: int = 2, **how: Any
) -> None:
    """Write a group for each prompt."""
    for index, one in enumerate(ids, first):
        stage.world.write(
            make_prompt(
                index,
                group_size=group_size,
                prompt_tokens=ids_buffer(one),
                n_prompt_tokens=len(one),
                sampling=r.Sampling(max_tokens=max_tokens, **how),
            )
        )


def complete(
    stage: Stage, n: int, *others: Any, rollouts: Sequence[Rollout], every: int = 12, versions: int = 1000
) -> dict[str, r.CompletedTrajectory]:
    """Step until ``n`` trajectories are completed, with a new version every so many turns, up to ``versions``.

    Turns in which nothing was there to do, since an engine works in a process of its own, do not count.
    """
    version = turn = 0
    patience = Deadline.after(240.0, f"{n} completed trajectories")
    while len(stage.completed()) < n:
        patience.check(f"{len(stage.completed())} of them")
        worked = [operator.step(stage.world.now) for operator in (*rollouts, *others)]
        stage.world.advance(0.02)
        if not any(worked):
            time.sleep(0.001)
            continue
        turn += 1
        if turn % every == 0 and version < versions:
            version += 1
            publish(stage, version)
    return stage.completed()


def trainer_logprobs(model: Any, prompt: Iterable[int], response: Tokens, temperature: float = 1.0) -> np.ndarray:
    """Logprob of each response token by the trainer's own function over one plain forward pass."""
    ids = [*prompt, *response.ids_T.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, len(ids) - response.n_tokens - 1 : -1]
    targets = torch.tensor([ids[-response.n_tokens :]])
    logprobs_BT, _ = token_logprobs(logits, targets, torch.tensor([temperature]))
    return logprobs_BT[0].numpy()


def worst(completed: Iterable[r.CompletedTrajectory], model: Callable[[int], Any]) -> float:
    """The largest difference between a recorded logprob and the trainer's under the recorded version.

    Versions that decrease within a trajectory are refused.
    """
    most = 0.0
    for one in completed:
        response = one.response
        versions_T = response.versions_T
        assert (np.diff(versions_T) >= 0).all(), f"{one.trajectory_id}: {versions_T.tolist()}"
        for version in sorted(set(versions_T.tolist())):
            expected = trainer_logprobs(model(version), ids_view(one.prompt.prompt_tokens).tolist(), response)
            here = versions_T == version
            most = max(most, float(np.abs(expected - response.logprobs_T)[here].max()))
    return most
