"""How many groups may be admitted now: a pure function of what was admitted and resolved.

Nothing is ever produced and then discarded (C3). Two bounds:

* ``outstanding <= max_outstanding``: keeps log and memory bounded however slow the trainer is (C9).
* With ``max_staleness = s``: ``admitted <= (k + s + 1) * groups_per_step + lost``, where k is the optimizer step after
  which the oldest outstanding group was admitted, and ``lost`` counts groups that ended outside a step (dead letters).
  So the trainer runs out of other groups exactly when the oldest one must not become staler: it is never dropped.

>>> allowance(Load(admitted=0, outstanding=0, resolved=0, steps=0, oldest_step=None),
...           max_outstanding=48, groups_per_step=16, max_staleness=0)
16
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "allowance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the log says about training groups."""

    admitted: int
    """Since the run began."""
    outstanding: int
    """Admitted and not resolved."""
    resolved: int
    """Every member trained, dropped or dead."""
    steps: int
    """Optimizer steps done."""
    oldest_step: int | None
    """Steps done when the oldest outstanding group was admitted; None: nothing is outstanding."""


def allowance(load: Load, *, max_outstanding: int, groups_per_step: int, max_staleness: int | None) -> int:
    """Groups that may be admitted now, at least 0."""
    room = max_outstanding - load.outstanding
    if max_staleness is not None:
        lost = max(0, load.resolved - load.steps * groups_per_step)
        oldest = load.steps if load.oldest_step is None else load.oldest_step
        room = min(room, (oldest + max_staleness + 1) * groups_per_step + lost - load.admitted)
    return max(0, room)
