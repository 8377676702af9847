"""A trajectory's life: lifecycle events, the finished trajectory, its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laminar.schemas.prompt import Prompt
from laminar.schemas.tokens import Tokens

__all__ = [
    "CompletedTrajectory",
    "FinishReason",
    "MoveReason",
    "ScoredTrajectory",
    "Snapshot",
    "Timings",
    "TrajectoryEnded",
    "TrajectoryMoved",
    "TrajectoryStarted",
    "TrajectoryTokens",
    "UpdateMode",
]

FinishReason = Literal["stop", "length"]
"""``stop``: an end token or stop string was sampled; ``length``: max_tokens or the model's limit was reached."""
MoveReason = Literal["repack", "dead", "handback", "drain", "lost"]
"""``repack``: planned; ``dead``: repack gives one of a dead owner to another; ``handback``: it does not fit, or its
version is not to be had; ``drain``: its owner stops, or has no engine; ``lost``: it was in an engine that died."""
UpdateMode = Literal["pinned", "in_flight"]
"""How a rollout takes new weights. ``pinned``: with nothing in the engine, so a trajectory has one version;
``in_flight``: as soon as they are there, so later tokens of a trajectory may have newer versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When a trajectory passed each stage, epoch milliseconds; 0 = not reached."""

    admitted_ms: int = 0
    """The prompt was produced."""
    started_ms: int = 0
    """A rollout took the group."""
    first_token_ms: int = 0
    ended_ms: int = 0
    moves: int = 0
    """How often it changed its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStarted:
    """A rollout owns this member from here on: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    """0 for the first owner; grows by one with each change of owner."""
    member: int
    prompt: Prompt
    """The whole prompt, so that the partial pool alone can resume the trajectory."""
    rollout_id: str
    incarnation: int
    """Of the rollout process: larger = younger."""
    version: int
    """Policy version the owner holds."""
    engine: str
    updates: UpdateMode = "pinned"
    """How its owner takes new weights."""
    seed: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTokens:
    """New tokens of a running trajectory: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    start: int
    """How many response tokens came before these; a fold appends only where start equals what it has."""
    tokens: Tokens
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMoved:
    """The trajectory changes its owner: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    """Of the new owner: the old owner's attempt + 1."""
    reason: MoveReason
    from_rollout: str
    to_rollout: str
    to_incarnation: int
    n_tokens: int
    """Response tokens at the move; the new owner continues from exactly these."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnded:
    """The trajectory left the partial pool: topic ``trajectories.partial``, key ``trajectory_id``.

    Written in the transaction that writes its CompletedTrajectory (or its DeadLetter).
    """

    trajectory_id: str
    attempt: int
    finish: FinishReason | None
    """None: it ended in a dead letter; ``error`` says why."""
    error: str | None = None
    n_tokens: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedTrajectory:
    """A finished trajectory, self-contained: topic ``trajectories.completed``, key ``group_id``."""

    trajectory_id: str
    group_id: str
    member: int
    attempt: int
    prompt: Prompt
    response: Tokens
    text: str
    """The response decoded without special tokens."""
    finish: FinishReason
    rollout_id: str
    engine: str
    logprobs_mode: Literal["raw", "processed"] = "processed"
    """``processed``: logprobs are of the distribution after temperature and truncation; ``raw``: before."""
    updates: UpdateMode = "pinned"
    """How the rollout that finished it takes new weights: ``pinned``, and it has one version."""
    seed: int
    version_min: int
    """Oldest policy version among the sampled tokens."""
    version_max: int
    timings: Timings
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A completed trajectory with its reward: topic ``trajectories.scored``, key ``group_id``."""

    trajectory: CompletedTrajectory
    reward: float | None
    """None: the verifier could not tell; ``failure`` says why. Never a made-up zero."""
    failure: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    function: str
    """The reward function, as configured."""
    latency_ms: float
    scored_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a rollout needs in order to go on with a trajectory."""

    trajectory_id: str
    attempt: int
    """Of the new owner."""
    member: int
    prompt: Prompt
    response: Tokens
    """What was sampled so far."""
    version: int
    """The policy version of its last token: no older one may go on with it, and where versions are pinned no other."""
    seed: int
    timings: Timings
