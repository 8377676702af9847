"""The records that give an orphan a new owner, as a pure function."""

from __future__ import annotations

from laminar.operators.repack.fold import Alive
from laminar.schemas import records as r

__all__ = ["TAKEN", "adopt"]

TAKEN = 2
"""By how much the attempt grows when repack takes a trajectory from an owner; the owner itself gives it away with 1
more. So an owner that is only slow, and wakes up inside the transaction that gives it away, makes no second owner of
the same attempt: what it began is of an older attempt, and void."""


def adopt(
    one: Alive, target: r.RolloutStatus, *, keep_tokens: bool, at_ms: int
) -> tuple[r.TrajectoryMoved, r.AdoptCommand]:
    """{Moved, Adopt}: ``target`` goes on with it, from its tokens or (``keep_tokens=False``) from its prompt."""
    attempt = one.attempt + TAKEN
    moved = r.TrajectoryMoved(
        trajectory_id=one.trajectory_id,
        attempt=attempt,
        reason="dead",
        from_rollout=one.owner[0],
        to_rollout=target.rollout_id,
        to_incarnation=target.incarnation,
        n_tokens=one.n_response if keep_tokens else 0,
        at_ms=at_ms,
    )
    version = one.version if keep_tokens and one.version >= 0 else target.version
    command = r.AdoptCommand(
        rollout_id=target.rollout_id,
        incarnation=target.incarnation,
        reason="dead",
        from_rollout=one.owner[0],
        snapshot=one.snapshot(attempt=attempt, version=version, keep_tokens=keep_tokens),
        at_ms=at_ms,
    )
    return moved, command
