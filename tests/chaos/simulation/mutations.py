"""Deliberate bugs: the proof that the simulation can see. Each is applied alone, by patching the real code.

python -m tests.chaos.simulation.mutations [NAME ...]        how many seeds each one needs
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from laminar.operators.prompts.operator import Prompts
from laminar.operators.repack import adoption
from laminar.operators.repack import operator as repack
from laminar.operators.repack.adoption import TAKEN
from laminar.operators.repack.fold import PartialPool
from laminar.operators.repack.policy import Load, Orphan, Placement
from laminar.operators.repack.roster import Roster
from laminar.operators.rollout import operator as rollout
from laminar.operators.rollout import updates, work
from laminar.operators.rollout.admission import Admission
from laminar.operators.rollout.ledger import Owned
from laminar.operators.rollout.round import Holding
from laminar.operators.rollout.work import Work
from laminar.operators.trainer import intake
from laminar.operators.trainer import operator as trainer
from laminar.operators.trainer.batch import Group
from laminar.operators.trainer.done import DoneGroups
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.publication import Publication
from laminar.pipeline.simulation.campaign import Workbench, workbench
from laminar.schemas import records as r
from laminar.schemas.errors import LaminarError, Retryable, Unavailable
from laminar.streams.loop import Loop
from laminar.streams.memory.store import MemoryStore
from laminar.streams.topics import outgoing

__all__ = ["MUTATIONS", "Mutation"]

SEEDS = 500


@dataclass(frozen=True)
class Mutation:
    """One bug."""

    breaks: str
    """What it breaks, in a line."""
    apply: Callable[[pytest.MonkeyPatch], None]
    seed: int
    """The first seed that finds it, counted from 0."""


def offsets_before_outputs(patch: pytest.MonkeyPatch) -> None:
    whole = MemoryStore.commit

    def commit(self: MemoryStore, tx: Any, deadline: Any) -> None:
        if tx.offsets and "reward" in tx.transactional_id:
            whole(self, replace(tx, records={}), deadline)
            tx = replace(tx, offsets=())
        whole(self, tx, deadline)

    patch.setattr(MemoryStore, "commit", commit)


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_check_producer", lambda self, name, epoch: None)


def redo_after_unknown(patch: pytest.MonkeyPatch) -> None:
    once = MemoryStore.commit

    def commit(self: MemoryStore, tx: Any, deadline: Any) -> None:
        try:
            once(self, tx, deadline)
        except Unavailable:
            once(self, tx, deadline)

    patch.setattr(MemoryStore, "commit", commit)


def offset_past_lost_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loop, "_failed", lambda self, batch, error, now, took_s: self._forget(batch.offsets))


def adoption_without_attempt(patch: pytest.MonkeyPatch) -> None:
    def same(codec: Any, record: Any) -> Any:
        if isinstance(record, r.TrajectoryMoved):
            record = replace(record, attempt=max(1, record.attempt - TAKEN))
        if isinstance(record, r.AdoptCommand):
            record = replace(record, snapshot=replace(record.snapshot, attempt=max(1, record.snapshot.attempt - TAKEN)))
        return outgoing(codec, record)

    patch.setattr(repack, "outgoing", same)


def adopts_from_the_living(patch: pytest.MonkeyPatch) -> None:
    owns = Roster.owns

    def impatient(self: Roster, owner: tuple[str, int], now: float, **since: float) -> bool:
        return owns(self, owner, now + 2.5, **{name: at + 2.5 for name, at in since.items()})

    patch.setattr(Roster, "owns", impatient)


def forgets_the_done(patch: pytest.MonkeyPatch) -> None:
    unpack = Progress.unpack

    def forgetful(saved: Any, codec: Any, where: str) -> Progress:
        found = unpack(saved, codec, where)
        return replace(found, positions={}, assembly=replace(found.assembly, done=DoneGroups()))

    patch.setattr(Progress, "unpack", staticmethod(forgetful))


def checkpoint_before_record(patch: pytest.MonkeyPatch) -> None:
    finish, record = trainer.Trainer._finish, trainer.training_step
    at_work: list[Any] = []

    def early(after: Any, *args: Any, **kwargs: Any) -> Any:
        operator = at_work[-1]
        before, operator._progress = operator._progress, after
        operator._save()
        operator._progress = before
        return record(after, *args, **kwargs)

    def finish_early(self: Any, now: float, work: Any) -> None:
        at_work.append(self)
        finish(self, now, work)

    patch.setattr(trainer, "training_step", early)
    patch.setattr(trainer.Trainer, "_finish", finish_early)


def published_before_durable(patch: pytest.MonkeyPatch) -> None:
    finish, save = trainer.Trainer._finish, trainer.Trainer._save

    def finish_late(self: Any, now: float, work: Any) -> None:
        self._save = lambda: None
        try:
            finish(self, now, work)
        finally:
            del self._save
        save(self)

    patch.setattr(trainer.Trainer, "_finish", finish_late)


def old_deltas_accepted(patch: pytest.MonkeyPatch) -> None:
    strict = PartialPool._tokens

    def tokens(self: PartialPool, event: r.TrajectoryTokens) -> None:
        known = self.alive.get(event.trajectory_id)
        strict(self, event if known is None else replace(event, attempt=known.attempt))

    patch.setattr(PartialPool, "_tokens", tokens)


def owner_and_repack_give_the_same_attempt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adoption, "TAKEN", 1)


def group_closes_without_a_member(patch: pytest.MonkeyPatch) -> None:
    complete = Group.complete
    patch.setattr(Group, "complete", lambda self, size: complete(self, size) or len(self.members) >= max(1, size - 1))


def dead_members_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_deaths", lambda *args, **kwargs: [])


def delta_dropped_at_release(patch: pytest.MonkeyPatch) -> None:
    leave = Work._leave

    def hasty(self: Work, owned: Owned, *args: Any) -> None:
        owned.settle()
        leave(self, owned, *args)

    patch.setattr(Work, "_leave", hasty)


def tokens_dropped_with_a_lost_engine(patch: pytest.MonkeyPatch) -> None:
    give_up = Work.give_up

    def hasty(self: Work, now: float) -> tuple[int, int]:
        for owned in self.ledger:
            owned.settle()
        return give_up(self, now)

    patch.setattr(Work, "give_up", hasty)


def lost_engine_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "engine_lost", lambda self, error, **how: None)


def group_half_begun_when_the_engine_is_lost(patch: pytest.MonkeyPatch) -> None:
    begin = Work.begin

    def careless(self: Work, owned: Owned, now: float) -> None:
        if self.lost is None:
            begin(self, owned, now)

    patch.setattr(Work, "begin", careless)


def heartbeats_ignored(patch: pytest.MonkeyPatch) -> None:
    hear = Roster.hear

    def once(self: Roster, status: r.RolloutStatus, now: float) -> None:
        known = self.newest(status.rollout_id)
        if known is None or known.incarnation != status.incarnation:
            hear(self, status, now)

    patch.setattr(Roster, "hear", once)


def zombie_keeps_its_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rollout.Rollout, "_lost_lease", lambda self, now: False)


def weights_swapped_within_a_round(patch: pytest.MonkeyPatch) -> None:
    decide = updates.version_to_load

    def any_time(holding: Holding, *args: Any, **kwargs: Any) -> int | None:
        return decide(replace(holding, sampling=0), *args, **kwargs)

    patch.setattr(updates, "version_to_load", any_time)


def weights_swapped_under_an_evaluation(patch: pytest.MonkeyPatch) -> None:
    decide = updates.version_to_load

    def any_time(holding: Holding, *args: Any, **kwargs: Any) -> int | None:
        return decide(replace(holding, answering=0), *args, **kwargs)

    patch.setattr(updates, "version_to_load", any_time)


def goes_on_under_older_weights(patch: pytest.MonkeyPatch) -> None:
    strict, placed = work.may_sample, repack.place

    def whatever_is_held(mode: r.UpdateMode, *, held: int, **tokens: int) -> bool:
        return held >= 0 if mode == "in_flight" else strict(mode, held=held, **tokens)

    def place(orphans: Iterable[Orphan], loads: Sequence[Load], **how: Any) -> tuple[Placement, ...]:
        return placed(orphans, [replace(load, version=load.version + load.in_flight) for load in loads], **how)

    patch.setattr(work, "may_sample", whatever_is_held)
    patch.setattr(repack, "place", place)


def unknown_admission_redone(patch: pytest.MonkeyPatch) -> None:
    admit = Prompts._admit

    def again(self: Prompts, now: float) -> bool:
        try:
            return admit(self, now)
        except Retryable:
            return admit(self, now)

    patch.setattr(Prompts, "_admit", again)


def fold_resumes_at_its_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartialPool, "resume_offsets", lambda self, positions: dict(positions))


def aborted_groups_taken(patch: pytest.MonkeyPatch) -> None:
    conclude = Admission._conclude

    def believe(self: Admission, *args: Any) -> bool:
        conclude(self, *args)
        return True

    patch.setattr(Admission, "_conclude", believe)


def version_number_reused(patch: pytest.MonkeyPatch) -> None:
    opened = trainer.open_run

    def same(*args: Any, **kwargs: Any) -> Any:
        opening = opened(*args, **kwargs)
        version = max(opening.parent, 0)
        return replace(opening, progress=replace(opening.progress, version=version))

    patch.setattr(trainer, "open_run", same)


def failed_publication_forgotten(patch: pytest.MonkeyPatch) -> None:
    attempt = Publication.attempt

    def give_up(self: Any, now: float, write: Any) -> None:
        attempt(self, now, write)
        self._wanted = None

    patch.setattr(Publication, "attempt", give_up)


_LISTED: tuple[tuple[str, Callable[[pytest.MonkeyPatch], None], int], ...] = (
    ("reward commits its offsets before its outputs: a crash between them loses results", offsets_before_outputs, 1),
    ("the log does not fence the older producer of an id", no_fencing, 23),
    ("a transaction is done again when its outcome is unknown, though it had committed", redo_after_unknown, 1),
    ("reward goes on behind records whose transaction failed", offset_past_lost_output, 7),
    ("repack gives an orphan to a new owner under the old attempt", adoption_without_attempt, 3),
    ("repack takes trajectories from rollouts whose last heartbeat is half a second old", adopts_from_the_living, 28),
    ("a resumed trainer reads from the beginning and has forgotten which groups are done", forgets_the_done, 0),
    ("the checkpoint is saved before the step is recorded", checkpoint_before_record, 0),
    ("a version is published before its checkpoint is durable", published_before_durable, 0),
    ("repack folds deltas of an older attempt", old_deltas_accepted, 222),
    (
        "a slow owner and repack give a trajectory away under the same attempt",
        owner_and_repack_give_the_same_attempt,
        309,
    ),
    ("the trainer closes a group while a member is missing", group_closes_without_a_member, 0),
    ("the trainer does not hear of dead members", dead_members_ignored, 0),
    ("the tokens since the last delta are lost when a trajectory moves", delta_dropped_at_release, 1),
    ("the tokens since the last delta are lost with the engine", tokens_dropped_with_a_lost_engine, 12),
    ("a rollout waits for what was in its engine when that was lost", lost_engine_not_noticed, 0),
    (
        "the engine is lost at the first of a group, and the others are forgotten",
        group_half_begun_when_the_engine_is_lost,
        25,
    ),
    ("repack hears only the first heartbeat of a process", heartbeats_ignored, 4),
    ("a rollout that slept beyond its lease goes on with its work", zombie_keeps_its_work, 2),
    ("weights are swapped while trajectories are being sampled", weights_swapped_within_a_round, 0),
    ("weights change under an evaluation's answers", weights_swapped_under_an_evaluation, 102),
    (
        "in flight an adopted trajectory goes on under older weights than its last token's",
        goes_on_under_older_weights,
        35,
    ),
    ("prompts admits again after a commit without an answer", unknown_admission_redone, 36),
    (
        "a restarted repack begins at the end of the pool, behind living trajectories",
        fold_resumes_at_its_end,
        14,
    ),
    ("a rollout samples groups whose taking was aborted", aborted_groups_taken, 14),
    ("a resumed trainer uses the version number of its checkpoint again", version_number_reused, 0),
    ("a publication that failed is not tried again", failed_publication_forgotten, 3),
)
MUTATIONS: dict[str, Mutation] = {apply.__name__: Mutation(breaks, apply, seed) for breaks, apply, seed in _LISTED}


def found_by(mutation: Mutation, bench: Workbench, seed: int) -> str:
    """What this seed finds wrong with the bug; empty: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        try:
            violations = bench.run(seed).violations
        except (LaminarError, AssertionError, LookupError) as error:  # it broke an operator in a way of its own
            return f"{type(error).__name__}: {error}"
    return str(violations[0]) if violations else ""


def seeds_needed(mutation: Mutation, seeds: int = SEEDS) -> tuple[int, str]:
    """How many seeds it took, and what was wrong; 0: none of them found it."""
    with workbench() as bench:
        for seed in range(seeds):
            found = found_by(mutation, bench, seed)
            if found:
                return seed + 1, found
    return 0, ""


def main(names: list[str]) -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for name in names or MUTATIONS:
        began = time.process_time()
        needed, rule = seeds_needed(MUTATIONS[name])
        missed += not needed
        found = f"{needed:4d} seeds" if needed else "NOT FOUND "
        sys.stdout.write(f"{found}  {time.process_time() - began:5.1f} s  {name}: {rule[:150]}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
