"""What operators still hold when nothing is in flight any more: memory follows that, so it must be nothing."""

from __future__ import annotations

from laminar.operators.operator import Operator
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.operator import Trainer
from laminar.streams.loop import Loop

__all__ = ["held_by"]


def held_by(operator: Operator) -> list[str]:
    """Trajectories, groups or records that it has not let go of."""
    if isinstance(operator, Repack):
        return sorted(operator._pool.alive)
    if isinstance(operator, Rollout):
        return [owned.trajectory_id for owned in operator._work.ledger]
    if isinstance(operator, Trainer):
        # An evaluation round of which no member was answered is known by its dead letters alone.
        return [group for group in sorted(operator._progress.assembly.groups) if not group.startswith("eval-")]
    if isinstance(operator, Loop):
        return [f"{operator.in_hand} records"] if operator.in_hand else []
    return []
