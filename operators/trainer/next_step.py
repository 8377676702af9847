"""Whether there is enough for an optimizer step, and of what."""

from __future__ import annotations

from dataclasses import replace

from laminar.operators.operator import RunInfo
from laminar.operators.trainer.batch import Assembly, take, take_returned
from laminar.operators.trainer.config import AlgorithmConfig
from laminar.operators.trainer.ending import exhausted
from laminar.operators.trainer.history import History
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.selection import Batch, select
from laminar.schemas.records import Dropped

__all__ = ["next_batch"]


def next_batch(
    progress: Progress, history: History, run: RunInfo, config: AlgorithmConfig
) -> tuple[Batch, Assembly] | None:
    """What the next optimizer step is made from, and the assembly once it is recorded; None: too few groups so far.

    What came back of groups that are done already is dropped with it.
    """
    assembly = progress.assembly
    n = len(assembly.ready)
    if n < run.groups_per_step and not (n and exhausted(history, assembly, n)):
        return None
    taken, after = take(assembly, run.groups_per_step)
    batch = select(taken, version=progress.version, max_staleness=run.max_staleness, config=config)
    returned, after = take_returned(after)
    closed = tuple(
        Dropped(trajectory_id=one.scored.trajectory.trajectory_id, reason="group_closed") for one in returned
    )
    return replace(batch, dropped=(*batch.dropped, *closed)), after
