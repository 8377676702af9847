"""The trainer operator: from scored trajectories to policy versions, each trajectory at most once.

It owns its offsets: they stand in its checkpoint, and what is committed to the broker is for lag display only. Per
optimizer step, in this order (docs/architecture.md)::

    1. take ``groups_per_step`` complete groups, oldest first; micro-batches; optimizer step
    2. one transaction: TrainingStep, and the display offsets
    3. a checkpoint, durable (every ``checkpoint.every`` steps)
    4. weights: staged into the relay; transaction {prepared}; sealed; transaction {committed}

A crash after 2 and before 3 leaves a record that the next TrainerStarted voids. On each start the trainer takes a new
epoch, fences its predecessor, and publishes the weights that it has under a version number that was never used.

>>> trainer = Trainer(config, context, learner=policy, publisher=publisher)          # doctest: +SKIP
>>> trainer.step(now)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from laminar.operators.operator import Context
from laminar.operators.trainer.batch import Assembly, close_round, lowest_offsets
from laminar.operators.trainer.batch import fold as fold_event
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.ending import Ending, exhausted
from laminar.operators.trainer.evaluation import evaluation_of
from laminar.operators.trainer.history import History, fold
from laminar.operators.trainer.intake import Intake
from laminar.operators.trainer.learner import Learner
from laminar.operators.trainer.next_step import next_batch
from laminar.operators.trainer.opening import open_run
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.publication import Publication
from laminar.operators.trainer.report import report, training_step
from laminar.operators.trainer.selection import Batch
from laminar.operators.trainer.writer import Writer
from laminar.operators.weights import WeightPublisher
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable

__all__ = ["Trainer", "build"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """The optimizer step in hand."""

    batch: Batch
    after: Assembly
    """The assembly once the step is recorded."""
    began: float
    """Seconds of the performance counter."""
    data_s: float
    """Time from the step before to this one's begin: waiting for trajectories."""


class Trainer:
    """See the module's docstring. Nothing is read or written before the first step."""

    def __init__(
        self,
        config: TrainerConfig,
        context: Context,
        *,
        learner: Learner,
        publisher: WeightPublisher,
        checkpoints: Checkpoints | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._context = context
        self._learner = learner
        folder = config.checkpoint.folder or context.run.run_dir / "checkpoints"
        self._checkpoints = checkpoints or Checkpoints(folder, keep=config.checkpoint.keep)
        self._publication = Publication(learner, publisher, config, context)
        self._on_close = on_close
        self._writer: Writer | None = None
        self._intake: Intake | None = None
        self._history = History()
        self._progress = Progress()
        self._work: _Work | None = None
        self._saved_step = -1
        self._checkpoint_s = 0.0
        self._idle_since = self._context.stopwatch()
        self._ending = Ending(context.run, config, context.clock)
        self._ended = False

    # -- Operator

    def step(self, now: float) -> bool:
        """See Operator.step: one micro-batch, or one small piece of everything around it."""
        if self._writer is None:
            self._start(now)
            return True
        if self._ended:
            return False
        if self._work is not None:
            if not self._learner.advance():
                self._finish(now, self._work)
            return True
        if self._publication.due(now):
            self._publication.attempt(now, self._writes.write)
        if self._write_evaluations(now):
            return True
        training = self._progress.step < self._context.run.steps
        if training and self._begin():
            return True
        if (not training or exhausted(self._history, self._progress.assembly)) and self._end(now):
            return True
        return self._read(now)

    def drain(self, now: float) -> bool:
        """Forget the batch in hand (its records are read again) and save what was learnt since the last checkpoint."""
        del now
        if self._work is not None:
            self._learner.abandon()
            self._work = None
        if self._writer is not None and self._progress.step > self._saved_step:
            self._save()
        return True

    def close(self) -> None:
        """See Operator.close."""
        if self._intake is not None:
            self._intake.close()
        if self._writer is not None:
            self._writer.close()
        self._on_close()

    # -- start

    def _start(self, now: float) -> None:
        run = self._context.run
        writer = Writer(self._context)
        opening = open_run(self._context, self._learner, self._checkpoints, timeout_s=self._config.log_timeout_s)
        self._history, self._progress = opening.history, opening.progress
        if self._progress.step > 0:
            self._saved_step = self._progress.step
        self._intake = Intake(self._context, self._progress.positions, steps_from=opening.steps_from)
        self._writer = writer
        self._writes.write(
            r.TrainerStarted(
                run_id=run.run_id,
                epoch=self._progress.epoch,
                step=self._progress.step,
                version=self._progress.version,
                at_ms=int(now * 1000),
            )
        )
        logger.info(
            "epoch %d: at step %d of %d, policy version %d, %d groups per step, max_staleness %s, checkpoints in %s",
            self._progress.epoch,
            self._progress.step,
            run.steps,
            self._progress.version,
            run.groups_per_step,
            run.max_staleness,
            self._checkpoints.folder,
        )
        at = self._progress
        self._context.measures.gauges.update(trainer_step=at.step, trainer_version=at.version, trainer_epoch=at.epoch)
        self._request_publication(opening.parent)

    @property
    def _writes(self) -> Writer:
        if self._writer is None:
            raise AssertionError("not started")
        return self._writer

    # -- reading

    def _read(self, now: float) -> bool:
        assert self._intake is not None
        taken = self._intake.poll(self._config.poll_records, now)
        if not taken.n_records:
            return False
        assembly = self._progress.assembly
        for event in taken.events:
            assembly = fold_event(assembly, event, group_size=self._context.run.group_size)
        for record in taken.others:
            self._history = fold(self._history, record, run_id=self._context.run.run_id)
        if taken.letters:
            self._writes.bury(taken.letters)
        self._progress = replace(self._progress, assembly=assembly, positions=self._intake.position())
        return True

    # -- one optimizer step

    def _begin(self) -> bool:
        found = next_batch(self._progress, self._history, self._context.run, self._config.algorithm)
        if found is None:
            return False
        batch, after = found
        began = self._context.stopwatch()
        self._learner.begin(batch, self._progress.step + 1)
        self._work = _Work(batch, after, began, began - self._idle_since)
        return True

    def _finish(self, now: float, work: _Work) -> None:
        run, before = self._context.run, self._progress
        learnt = self._learner.finish()
        self._work = None
        after = replace(before, step=before.step + 1, version=before.version + 1, assembly=work.after)
        lowest = lowest_offsets(after.assembly, after.positions)
        metrics = {
            **learnt,
            "data_s": work.data_s,
            # The record precedes its own checkpoint and publication: these are of the step before.
            "checkpoint_s": self._checkpoint_s,
            **self._publication.metrics(),
        }
        record = training_step(
            after,
            work.batch,
            run_id=run.run_id,
            metrics=metrics,
            offsets=lowest,
            duration_ms=(self._context.stopwatch() - work.began) * 1000,
            now=now,
        )
        self._writes.write_at(record, lowest)
        self._progress = after
        self._context.measures.gauges.update(trainer_step=after.step, trainer_version=after.version)
        report(record, self._config)
        if after.step % self._config.checkpoint.every == 0 or after.step >= run.steps:
            self._save()
        self._request_publication(before.version)
        self._publication.attempt(now, self._writes.write)
        self._idle_since = self._context.stopwatch()

    # -- what follows a step

    def _save(self) -> None:
        began = self._context.stopwatch()
        progress = self._progress
        name = f"{progress.step:08d}.{progress.epoch}"
        try:
            self._checkpoints.save(name, progress.pack(), self._learner)
        except (OSError, RuntimeError) as error:  # torch wraps the former in the latter
            raise Unavailable(
                f"{self._checkpoints.folder / name}: not saved: {error} (the trainer goes on from the checkpoint before"
                f" it as soon as it can write there)"
            ) from error
        self._saved_step = progress.step
        self._checkpoint_s = self._context.stopwatch() - began

    def _request_publication(self, parent: int) -> None:
        at = self._progress
        self._publication.request(epoch=at.epoch, version=at.version, parent=parent, step=at.step)

    def _write_evaluations(self, now: float) -> bool:
        """Write the result of one complete round, if there is one (the last only after the last step)."""
        for number, known in self._progress.assembly.rounds.items():
            if known.complete and number != self._context.run.final_round:
                self._write_evaluation(number, now)
                return True
        return False

    def _write_evaluation(self, number: int, now: float) -> None:
        progress = self._progress
        known = progress.assembly.rounds.get(number)
        if known is not None and number not in self._history.evaluated:
            result = evaluation_of(known, number, run_id=self._context.run.run_id, progress=progress, now=now)
            self._writes.write(result)
            self._history = fold(self._history, result, run_id=self._context.run.run_id)
            logger.info("evaluation round %d: reward %.3f over %d answers", number, result.reward_mean, result.n)
        self._progress = replace(progress, assembly=close_round(progress.assembly, number))

    # -- the end

    def _end(self, now: float) -> bool:
        """Write RunEnded once the checkpoint is durable and the last evaluation there, or its next answer overdue."""
        run, step = self._context.run, self._progress.step
        if step > self._saved_step:
            self._save()
        reason = self._ending.reason(step, self._history, self._progress.assembly)
        if reason is None:
            return False
        for number in self._ending.rounds(self._history, self._progress.assembly):
            self._write_evaluation(number, now)
        ended = r.RunEnded(
            run_id=run.run_id,
            epoch=self._progress.epoch,
            step=step,
            reason=reason,
            at_ms=int(now * 1000),
        )
        lowest = lowest_offsets(self._progress.assembly, self._progress.positions)
        self._writes.write_at(ended, lowest)
        self._ended = True
        logger.info("the run ended: %s", ended.reason)
        return True


def build(config: TrainerConfig, context: Context) -> Trainer:
    """The operator of a run file's ``kind: trainer``. Raises ConfigError."""
    from laminar.operators.relay.publisher import RelayPublisher
    from laminar.operators.trainer.policy import Policy, load_model

    policy = Policy(
        load_model(context.run.model), config, total_steps=context.run.steps, publish_dtype=context.run.model.dtype
    )
    publisher = RelayPublisher.from_context(context)
    return Trainer(config, context, learner=policy, publisher=publisher, on_close=publisher.close)
