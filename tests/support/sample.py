"""Sound records for tests: each builder takes what matters to the test and fills in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens, ids_buffer


def prompt(index: int = 0, *, epoch: int = 0, group_size: int = 2, **changes: Any) -> r.Prompt:
    ids: Sequence[int] = changes.pop("ids", (1, 2, 3))
    values: dict[str, Any] = {
        "prompt_id": f"data/{epoch}/{index}",
        "dataset": "data",
        "epoch": epoch,
        "index": index,
        "purpose": "train",
        "task": "sort",
        "group_size": group_size,
        "prompt_tokens": ids_buffer(ids),
        "n_prompt_tokens": len(ids),
        "prompt_text": "cab",
        "reference": "abc",
        "sampling": r.Sampling(max_tokens=32),
        "seed": 7,
        "created_ms": 1_000,
    }
    return r.Prompt(**{**values, **changes})


def tokens(n: int = 3, *, version: int = 0) -> Tokens:
    return Tokens.build(ids=list(range(10, 10 + n)), logprobs=[-0.5] * n, version=version)


def started(of: r.Prompt | None = None, member: int = 0, **changes: Any) -> r.TrajectoryStarted:
    of = of or prompt()
    values: dict[str, Any] = {
        "trajectory_id": r.trajectory_id(of.prompt_id, member),
        "attempt": 0,
        "member": member,
        "prompt": of,
        "rollout_id": "rollout-0",
        "incarnation": 1,
        "version": 0,
        "engine": "scripted",
        "seed": 7,
        "at_ms": 2_000,
    }
    return r.TrajectoryStarted(**{**values, **changes})


def ended(trajectory_id: str = "data/0/0/0", **changes: Any) -> r.TrajectoryEnded:
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "attempt": 0,
        "finish": "stop",
        "n_tokens": 3,
        "at_ms": 3_000,
    }
    return r.TrajectoryEnded(**{**values, **changes})


def completed(
    of: r.Prompt | None = None, member: int = 0, *, version: int = 0, **changes: Any
) -> r.CompletedTrajectory:
    of = of or prompt()
    values: dict[str, Any] = {
        "trajectory_id": r.trajectory_id(of.prompt_id, member),
        "group_id": of.prompt_id,
        "member": member,
        "attempt": 0,
        "prompt": of,
        "response": tokens(version=version),
        "text": "abc",
        "finish": "stop",
        "rollout_id": "rollout-0",
        "engine": "scripted",
        "seed": 7,
        "version_min": version,
        "version_max": version,
        "timings": r.Timings(admitted_ms=1_000, started_ms=2_000, first_token_ms=2_100, ended_ms=3_000),
    }
    return r.CompletedTrajectory(**{**values, **changes})


def scored(of: r.CompletedTrajectory | None = None, **changes: Any) -> r.ScoredTrajectory:
    values: dict[str, Any] = {
        "trajectory": of or completed(),
        "reward": 1.0,
        "function": "exact",
        "latency_ms": 0.5,
        "scored_ms": 4_000,
    }
    if "reward" in changes and changes["reward"] is None:
        values["failure"] = "verifier unavailable"
    return r.ScoredTrajectory(**{**values, **changes})


def trainer_started(**changes: Any) -> r.TrainerStarted:
    values: dict[str, Any] = {"run_id": "run", "epoch": 1, "step": 0, "version": 0, "at_ms": 500}
    return r.TrainerStarted(**{**values, **changes})


def training_step(
    step: int = 1, *, trained: Sequence[str] = (), dropped: Sequence[r.Dropped] = (), **changes: Any
) -> r.TrainingStep:
    values: dict[str, Any] = {
        "run_id": "run",
        "epoch": 1,
        "step": step,
        "version": step,
        "trained": tuple(trained),
        "dropped": tuple(dropped),
        "staleness": {},
        "metrics": {},
        "offsets": {},
        "n_tokens": 3,
        "duration_ms": 1.0,
        "at_ms": 5_000,
    }
    return r.TrainingStep(**{**values, **changes})
