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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laminar.operators.operator import Context
from laminar.operators.trainer.batch import Assembly, close_round, lowest_offsets, take, take_returned
from laminar.operators.trainer.batch import fold as fold_event
from laminar.operators.trainer.checkpoint import Checkpoints
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.evaluation import evaluation_of
from laminar.operators.trainer.history import History, fold
from laminar.operators.trainer.intake import Intake
from laminar.operators.trainer.learner import Learner
from laminar.operators.trainer.opening import open_run
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.publication import Publication
from laminar.operators.trainer.report import report, training_step
from laminar.operators.trainer.selection import Batch, select
from laminar.operators.weights import WeightPublisher
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from laminar.streams.dead_letter import send_letter
from laminar.streams.deadline import Deadline
from laminar.streams.log import Membership, Producer
from laminar.streams.topics import outgoing

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
        self._producer: Producer | None = None
        self._intake: Intake | None = None
        self._history = History()
        self._progress = Progress()
        self._work: _Work | None = None
        self._saved_step = -1
        self._checkpoint_s = 0.0
        self._idle_since = self._context.stopwatch()
        self._final: Deadline | None = None
        self._final_settled = 0
        """Members of the awaited evaluation rounds that were settled when ``_final`` began."""
        self._ended = False

    # -- Operator

    def step(self, now: float) -> bool:
        """See Operator.step: one micro-batch, or one small piece of everything around it."""
        if self._producer is None:
            self._start(now)
            return True
        if self._ended:
            return False
        if self._work is not None:
            if not self._learner.advance():
                self._finish(now, self._work)
            return True
        if self._publication.due(now):
            self._publication.attempt(now, self._write)
        if self._write_evaluations(now):
            return True
        training = self._progress.step < self._context.run.steps
        if training and self._begin(now):
            return True
        if (not training or self._exhausted) and self._end(now):
            return True
        return self._read(now)

    def drain(self, now: float) -> bool:
        """Forget the batch in hand (its records are read again) and save what was learnt since the last checkpoint."""
        del now
        if self._work is not None:
            self._learner.abandon()
            self._work = None
        if self._producer is not None and self._progress.step > self._saved_step:
            self._save()
        return True

    def close(self) -> None:
        """See Operator.close."""
        if self._intake is not None:
            self._intake.close()
        if self._producer is not None:
            self._producer.close()
        self._on_close()

    # -- start

    def _start(self, now: float) -> None:
        run = self._context.run
        producer = self._context.log.producer(self._context.transactional_id)
        opening = open_run(self._context, self._learner, self._checkpoints, timeout_s=self._config.log_timeout_s)
        self._history, self._progress = opening.history, opening.progress
        if self._progress.step > 0:
            self._saved_step = self._progress.step
        self._intake = Intake(self._context, self._progress.positions, steps_from=opening.steps_from)
        self._producer = producer
        self._write(
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
            self._write_letters(taken.letters)
        self._progress = replace(self._progress, assembly=assembly, positions=self._intake.position())
        return True

    # -- one optimizer step

    @property
    def _exhausted(self) -> bool:
        """Whether every training group that there will ever be is done."""
        groups, assembly = self._history.exhausted_groups, self._progress.assembly
        return groups is not None and len(assembly.done) + len(assembly.lost) >= groups

    def _begin(self, now: float) -> bool:
        del now
        run, assembly = self._context.run, self._progress.assembly
        n = len(assembly.ready)
        groups = self._history.exhausted_groups
        last = groups is not None and n > 0 and len(assembly.done) + len(assembly.lost) + n >= groups
        if n < run.groups_per_step and not last:
            return False
        taken, after = take(assembly, run.groups_per_step)
        batch = select(
            taken,
            version=self._progress.version,
            max_staleness=run.max_staleness,
            config=self._config.algorithm,
        )
        returned, after = take_returned(after)
        closed = tuple(
            r.Dropped(trajectory_id=one.scored.trajectory.trajectory_id, reason="group_closed") for one in returned
        )
        batch = replace(batch, dropped=(*batch.dropped, *closed))
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
            "publish_s": self._publication.last_s,
            "probes_s": self._publication.probes_s,
            "publish_failures": float(self._publication.failures),
            "publish_identical": float(self._publication.identical),
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
        assert self._producer is not None
        with self._producer.transaction() as tx:
            tx.send(outgoing(self._context.codec, record))
            tx.commit_offsets(Membership(self._context.group), lowest)
        self._progress = after
        self._context.measures.gauges.update(trainer_step=after.step, trainer_version=after.version)
        report(record, self._config)
        if after.step % self._config.checkpoint.every == 0 or after.step >= run.steps:
            self._save()
        self._request_publication(before.version)
        self._publication.attempt(now, self._write)
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
            self._write(result)
            self._history = fold(self._history, result, run_id=self._context.run.run_id)
            logger.info("evaluation round %d: reward %.3f over %d answers", number, result.reward_mean, result.n)
        self._progress = replace(progress, assembly=close_round(progress.assembly, number))

    # -- the end

    def _end(self, now: float) -> bool:
        """Write RunEnded once the checkpoint is durable and the last evaluation there, or its next answer overdue."""
        run, step = self._context.run, self._progress.step
        if step > self._saved_step:
            self._save()
        reason = f"all {run.steps} steps are done"
        if self._exhausted and step < run.steps:
            reason = f"data exhausted at step {step}"
        awaited = self._awaited_rounds()
        if awaited and not self._overdue(awaited):
            return False
        if awaited and self._final is not None:
            there = "; ".join(self._answers_of(number) for number in awaited)
            reason += f"; {self._final.exceeded(there)}"
            logger.warning("the run ends with an incomplete evaluation: %s", reason)
        for number in sorted({*awaited, run.final_round} if self._waits_for_final_round() else awaited):
            self._write_evaluation(number, now)
        ended = r.RunEnded(
            run_id=run.run_id,
            epoch=self._progress.epoch,
            step=step,
            reason=reason,
            at_ms=int(now * 1000),
        )
        lowest = lowest_offsets(self._progress.assembly, self._progress.positions)
        assert self._producer is not None
        with self._producer.transaction() as tx:
            tx.send(outgoing(self._context.codec, ended))
            tx.commit_offsets(Membership(self._context.group), lowest)
        self._ended = True
        logger.info("the run ended: %s", ended.reason)
        return True

    def _awaited_rounds(self) -> list[int]:
        """Evaluation rounds that have begun, or must come, and lack answers."""
        rounds = self._progress.assembly.rounds
        found = [number for number, known in rounds.items() if not known.complete]
        if self._evaluates():
            must = {0, self._context.run.final_round} - self._history.evaluated - rounds.keys()
            found += sorted(must)  # the first may have begun without an answer so far
        return found

    def _overdue(self, awaited: list[int]) -> bool:
        """Whether the next answer of these rounds has been waited for long enough."""
        rounds = self._progress.assembly.rounds
        settled = sum(len(rounds[n].answers) + len(rounds[n].dead) for n in awaited if n in rounds)
        if self._final is None or settled != self._final_settled:
            self._final_settled = settled
            self._final = Deadline.after(
                self._config.final_evaluation_timeout_s, "last evaluation round", self._context.clock
            )
        return self._final.passed

    def _answers_of(self, number: int) -> str:
        known = self._progress.assembly.rounds.get(number)
        return f"round {number}: " + (f"{len(known.answers)} of {known.size} answers" if known else "no answer")

    def _waits_for_final_round(self) -> bool:
        return self._context.run.final_round not in self._history.evaluated and self._evaluates()

    def _evaluates(self) -> bool:
        if self._config.final_evaluation is not None:
            return self._config.final_evaluation
        return bool(self._history.evaluated or self._progress.assembly.rounds)

    def _write_letters(self, letters: Sequence[r.DeadLetter]) -> None:
        assert self._producer is not None
        with self._producer.transaction() as tx:
            for letter in letters:
                send_letter(tx, self._context.codec, letter)

    def _write(self, *records: r.Record) -> None:
        assert self._producer is not None
        with self._producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(self._context.codec, record))


def build(config: TrainerConfig, context: Context) -> Trainer:
    """The operator of a run file's ``kind: trainer``. Raises ConfigError."""
    from laminar.operators.relay.publisher import RelayPublisher
    from laminar.operators.trainer.policy import Policy, load_model

    policy = Policy(
        load_model(context.run.model), config, total_steps=context.run.steps, publish_dtype=context.run.model.dtype
    )
    publisher = RelayPublisher.from_context(context)
    return Trainer(config, context, learner=policy, publisher=publisher, on_close=publisher.close)
