"""The records that a rollout writes about a trajectory, as pure functions."""

from __future__ import annotations

from laminar.operators.rollout.ledger import Owned
from laminar.schemas import records as r

__all__ = ["POOL", "adopt", "completed", "dead_letter", "ended", "moved", "started", "tokens"]

POOL = 0
"""Incarnation of no process: what is moved to it waits in the partial pool until repack finds it an owner."""


def started(
    owned: Owned, *, rollout_id: str, incarnation: int, version: int, engine: str, updates: r.UpdateMode
) -> r.TrajectoryStarted:
    """The rollout owns this member from here on."""
    return r.TrajectoryStarted(
        trajectory_id=owned.trajectory_id,
        attempt=owned.attempt,
        member=owned.member,
        prompt=owned.prompt,
        rollout_id=rollout_id,
        incarnation=incarnation,
        version=version,
        engine=engine,
        updates=updates,
        seed=owned.seed,
        at_ms=owned.started_ms,
    )


def tokens(owned: Owned, at_ms: int) -> r.TrajectoryTokens:
    """The fresh tokens."""
    return r.TrajectoryTokens(
        trajectory_id=owned.trajectory_id,
        attempt=owned.attempt,
        start=owned.n_settled,
        tokens=owned.fresh(),
        at_ms=at_ms,
    )


def completed(
    owned: Owned,
    finish: r.FinishReason,
    *,
    text: str,
    rollout_id: str,
    engine: str,
    updates: r.UpdateMode,
    version: int,
    at_ms: int,
) -> r.CompletedTrajectory:
    """The finished trajectory. ``version``: the rollout's, for a response without tokens."""
    response = owned.response()
    versions = response.versions_T[response.mask_T != 0]
    return r.CompletedTrajectory(
        trajectory_id=owned.trajectory_id,
        group_id=owned.prompt.prompt_id,
        member=owned.member,
        attempt=owned.attempt,
        prompt=owned.prompt,
        response=response,
        text=text,
        finish=finish,
        rollout_id=rollout_id,
        engine=engine,
        updates=updates,
        seed=owned.seed,
        version_min=int(versions.min()) if versions.size else version,
        version_max=int(versions.max()) if versions.size else version,
        timings=owned.timings(ended_ms=at_ms),
    )


def ended(owned: Owned, finish: r.FinishReason | None, at_ms: int, error: str | None = None) -> r.TrajectoryEnded:
    """It left the partial pool."""
    return r.TrajectoryEnded(
        trajectory_id=owned.trajectory_id,
        attempt=owned.attempt,
        finish=finish,
        error=error,
        n_tokens=owned.n_response,
        at_ms=at_ms,
    )


def moved(
    owned: Owned, *, reason: r.MoveReason, from_rollout: str, to_rollout: str, to_incarnation: int, at_ms: int
) -> r.TrajectoryMoved:
    """It changes its owner."""
    return r.TrajectoryMoved(
        trajectory_id=owned.trajectory_id,
        attempt=owned.attempt + 1,
        reason=reason,
        from_rollout=from_rollout,
        to_rollout=to_rollout,
        to_incarnation=to_incarnation,
        n_tokens=owned.n_response,
        at_ms=at_ms,
    )


def adopt(
    owned: Owned, *, from_rollout: str, to_rollout: str, to_incarnation: int, version: int, at_ms: int
) -> r.AdoptCommand:
    """The new owner's order to go on."""
    return r.AdoptCommand(
        rollout_id=to_rollout,
        incarnation=to_incarnation,
        reason="repack",
        from_rollout=from_rollout,
        snapshot=owned.snapshot(version=version),
        at_ms=at_ms,
    )


def dead_letter(owned: Owned, *, operator: str, kind: str, error: str, at_ms: int) -> r.DeadLetter:
    """It could not be sampled."""
    return r.DeadLetter(
        operator=operator,
        kind=kind,
        error=error,
        topic="trajectories.partial",
        partition=-1,
        offset=-1,
        attempt=max(1, owned.tries),
        key=owned.trajectory_id.encode(),
        value=None,
        group_id=owned.prompt.prompt_id,
        trajectory_ids=(owned.trajectory_id,),
        at_ms=at_ms,
    )
