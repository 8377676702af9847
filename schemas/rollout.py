"""Rollouts: heartbeats and commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laminar.schemas.trajectory import MoveReason, Snapshot, UpdateMode

__all__ = ["AdoptCommand", "DrainCommand", "InFlight", "ReleaseCommand", "RolloutState", "RolloutStatus"]

RolloutState = Literal["starting", "idle", "sampling", "loading", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """One trajectory inside a rollout."""

    trajectory_id: str
    attempt: int
    n_tokens: int
    """Prompt and response tokens: what it needs of the KV cache now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """A rollout's heartbeat: topic ``rollouts.status``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    state: RolloutState
    version: int
    """Policy version held; -1 before the first load."""
    kv_used: int
    """Tokens in the KV cache."""
    kv_total: int
    """Tokens that fit into the KV cache."""
    running: int
    waiting: int
    preempted: int
    """Since start."""
    max_running: int
    """B, the engine's batch limit."""
    tokens_per_s: float
    in_flight: tuple[InFlight, ...]
    at_ms: int
    lease_s: float = 0.0
    """Silent for at most so long, it keeps what it has in hand: nobody may take that from it before. 0: not said."""
    updates: UpdateMode = "pinned"
    """How it takes new weights."""
    engine_losses: int = 0
    """How often its engine died, hung or was given up, and started anew, since the process started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCommand:
    """Give these trajectories to another rollout: topic ``rollouts.commands``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    """The process it is meant for; another one ignores it."""
    trajectory_ids: tuple[str, ...]
    to_rollout: str
    to_incarnation: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptCommand:
    """Go on with this trajectory: topic ``rollouts.commands``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    reason: MoveReason
    from_rollout: str
    snapshot: Snapshot
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Take no new work, finish or hand over what is running, then stop: topic ``rollouts.commands``."""

    rollout_id: str
    incarnation: int
    at_ms: int
