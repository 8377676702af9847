"""How a trainer begins: the run's history from the log, its own state from the checkpoint, a new epoch and version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laminar.operators.operator import Context
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.history import History, fold
from laminar.operators.trainer.intake import STEPS
from laminar.operators.trainer.learner import Learner
from laminar.operators.trainer.progress import Progress
from laminar.schemas.errors import CheckpointError, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.reading import decoded, read_topic

__all__ = ["Opening", "open_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where the trainer begins."""

    history: History
    steps_from: int
    """Offset on ``training.steps`` after what is in the history."""
    progress: Progress
    """With the new epoch and the version under which the resumed weights are published."""
    parent: int
    """Version that the resumed weights had before; -1 for a new run."""


def open_run(context: Context, learner: Learner, checkpoints: Checkpoints, *, timeout_s: float) -> Opening:
    """Read the history, restore the learner, take the next epoch and an unused version.

    The caller's producer has fenced the trainer before this one, so the history is final. Raises CheckpointError,
    DeadlineExceeded, Unavailable (the folder cannot be written).
    """
    run = context.run
    history, steps_from = _read_history(context, timeout_s)
    saved = checkpoints.load(learner)
    if saved is None and history.epoch >= 0 and not checkpoints.begun:
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint, but run '{run.run_id}' has trained to step {history.step};"
            f" restore the folder, or use another run_dir and log"
        )
    try:
        checkpoints.begin()
    except OSError as error:
        raise Unavailable(f"{checkpoints.folder}: cannot be written: {error}") from error
    found = Progress() if saved is None else Progress.unpack(saved, context.codec, str(checkpoints.folder))
    progress = replace(
        found,
        epoch=max(history.epoch, found.epoch) + 1,
        version=max(history.version, found.version) + 1,
    )
    return Opening(history=history, steps_from=steps_from, progress=progress, parent=found.version)


def _read_history(context: Context, timeout_s: float) -> tuple[History, int]:
    deadline = Deadline.after(timeout_s, "trainer reads the run's history", context.clock)
    history, steps_from = History(), 0
    for topic in (STEPS, "weights.versions"):
        for record in read_topic(context.log, topic, deadline):
            if topic == STEPS:
                steps_from = record.offset + 1
            for _, event in decoded([record], context.codec):
                history = fold(history, event, run_id=context.run.run_id)
    return history, steps_from
