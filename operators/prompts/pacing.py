"""How many groups may be admitted now: a pure function of what is outstanding and of what training has done.

Nothing is ever produced and then discarded (C3). Three bounds:

* ``outstanding <= max_outstanding``: keeps log and memory bounded however slow the trainer is (C9).
* ``outstanding <= (total_steps - steps) * groups_per_step``: the run's last step takes the last group.
* With ``max_staleness = s``: ``outstanding <= (k + s + 1 - steps) * groups_per_step``, where k is the optimizer step
  behind the oldest policy version that an outstanding group, or one admitted now, may be sampled by. So the trainer
  runs out of other groups exactly when the oldest one must not become staler: it is never dropped. Since k is at
  least ``steps - s`` while anything is outstanding, there is always room for a whole step, and training goes on.

>>> allowance(Load(outstanding=0, steps=0, oldest_step=None, newest_step=0),
...           max_outstanding=48, groups_per_step=16, total_steps=100, max_staleness=0)
16
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "allowance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the log says about training groups."""

    outstanding: int
    """Admitted and not resolved: not every member is trained, dropped or dead."""
    steps: int
    """Optimizer steps done."""
    oldest_step: int | None
    """Optimizer steps behind the version for which the oldest outstanding group was admitted; None: there is none."""
    newest_step: int
    """Optimizer steps behind the newest committed version: that of a group admitted now. Below ``steps`` between a
    step and the publication of its version."""


def allowance(
    load: Load, *, max_outstanding: int, groups_per_step: int, total_steps: int, max_staleness: int | None
) -> int:
    """Groups that may be admitted now, at least 0."""
    room = min(max_outstanding, (total_steps - load.steps) * groups_per_step) - load.outstanding
    if max_staleness is not None:
        oldest = load.newest_step
        if load.oldest_step is not None:
            # What is too old already (the bound was lowered between two runs) must not keep others out for good.
            oldest = min(oldest, max(load.oldest_step, load.steps - max_staleness))
        room = min(room, (oldest + max_staleness + 1 - load.steps) * groups_per_step - load.outstanding)
    return max(0, room)
