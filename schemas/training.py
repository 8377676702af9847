"""The run as the trainer writes it: start, steps, evaluations, end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DataExhausted", "DropReason", "Dropped", "Evaluation", "RunEnded", "TrainerStarted", "TrainingStep"]

DropReason = Literal[
    "eval", "stale", "zero_advantage", "unscored", "min_group", "duplicate", "truncated", "group_closed"
]
"""Why a finished member was not trained on. ``eval``: it was for evaluation; ``unscored``: its reward is null;
``group_closed``: it came back from a dead letter after its group was consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """One finished member that is not trained on."""

    trajectory_id: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted:
    """A trainer process begins: topic ``training.steps``, key ``run_id``.

    It voids every TrainingStep of an older epoch whose step is above ``step``: the trainer resumed from a
    checkpoint below it, and what those steps consumed is consumed again.
    """

    run_id: str
    epoch: int
    step: int
    """The checkpoint's step; 0 for a new run."""
    version: int
    """Policy version under which the resumed weights are published."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One optimizer step: topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    """1 for the first."""
    version: int
    """The policy version this step made."""
    trained: tuple[str, ...]
    """Trajectory ids whose tokens entered the loss."""
    dropped: tuple[Dropped, ...]
    """Finished members that this step resolved without training on them."""
    staleness: Mapping[str, int]
    """Histogram over trained trajectories: (version before the step - version_min) -> count."""
    metrics: Mapping[str, float]
    offsets: Mapping[str, int]
    """``topic[partition]`` -> lowest offset that is not resolved yet."""
    n_tokens: int
    """Response tokens that entered the loss."""
    duration_ms: float
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation round: topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    round: int
    """0 = before training."""
    version: int
    """Oldest policy version among the answers."""
    reward_mean: float
    n: int
    """Scored answers."""
    resolved: tuple[Dropped, ...]
    """Every member of the round that came in, with reason ``eval`` (or ``unscored``)."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataExhausted:
    """No training group will follow: topic ``training.steps``, key ``run_id``. Written by ``prompts``."""

    run_id: str
    groups: int
    """Training groups admitted in all."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The end event: every operator drains and exits 0. Topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    reason: str
    at_ms: int
