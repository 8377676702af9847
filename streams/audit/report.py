"""From the audit's state to a ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from laminar.streams.audit.fold import Fold
from laminar.streams.audit.member import Member
from laminar.streams.audit.rules import View, findings, stage, standing
from laminar.streams.audit.steps import Step
from laminar.streams.ledger import Ledger, Place, Stage, Violation
from laminar.streams.log import TopicPartition

__all__ = ["Reached", "report"]

_LETTERED = frozenset({"prompts", "trajectories.completed", "trajectories.scored"})
"""Topics whose consumer writes a dead letter for what it cannot decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far everybody had come at some moment; everything that stood on the log then has been read."""

    ends: Mapping[TopicPartition, int]
    """Of the topics."""
    committed: Mapping[TopicPartition, int]
    """Of prompts by the rollouts, of completed by reward."""
    trainer: Mapping[TopicPartition, int]
    """Of scored, as the trainer committed it for display: true once the run has ended."""

    def holds(self, place: Place) -> bool:
        """Whether this record was there at that moment, so that whatever it needs has been read."""
        return place.offset < self.ends.get(TopicPartition(place.topic, place.partition), 0)


def report(fold: Fold, reached: Reached) -> Ledger:
    """The ledger as of now."""
    last = _last_step(fold, reached.holds)
    passed = dict(reached.committed)
    if last is not None:
        for name, offset in last.offsets.items():
            topic, _, partition = name.removesuffix("]").rpartition("[")
            passed[TopicPartition(topic, int(partition))] = offset

    def has_passed(place: Place) -> bool:
        return place.offset < passed.get(TopicPartition(place.topic, place.partition), 0)

    view = fold.view(reached.holds, has_passed, _unsettled(fold, reached))
    violations = [*fold.steps.violations(), *fold.versions.violations(fold.steps.highest, reached.holds)]
    violations += fold.letters.violations(reached.holds, incomplete="dead.letters" in fold.gone)
    violations += _unreadable(fold, view)
    unnamed = fold.letters.unnamed(fold.unreadable)
    trained = fold.settled_fates["trained"]
    dropped = Counter({name: n for name, n in fold.settled_fates.items() if name != "trained" and n})
    late, admitted = sum(fold.settled_late.values()), len(fold.settled)
    dead = unknown = 0
    in_flight: Counter[Stage] = Counter()
    for trajectory_id, member in sorted(fold.members.items()):
        late += member.late
        group = trajectory_id.rsplit("/", 1)[0]
        found, buried = _judged(trajectory_id, member, view, unnamed, group)
        violations += found
        if not member.prompts:
            unknown += view.incomplete
            continue
        admitted += 1
        if member.resolutions:
            reasons = [one.reason for one in member.resolutions]
            if None in reasons:
                trained += 1
            else:
                dropped[str(reasons[0])] += 1
        elif buried or standing(member, view):
            dead += 1
        else:
            in_flight[stage(member)] += 1
    return Ledger(
        run_id=fold.run_id,
        admitted=admitted,
        trained=trained,
        dropped=dict(dropped),
        dead=dead,
        in_flight=dict(in_flight),
        late=late,
        steps=fold.steps.steps,
        void_steps=fold.steps.void_steps,
        undecodable=len(fold.unreadable),
        staleness=dict(fold.steps.staleness),
        max_versions_per_trajectory=fold.max_versions,
        mean_versions_per_trajectory=fold.n_versions / max(1, fold.n_sampled),
        incomplete=tuple(sorted(fold.gone - {"rollouts.commands"})),
        violations=tuple(violations),
        skipped=tuple(sorted(fold.letters.skipped, key=str)),
        unknown=unknown,
        retried=fold.letters.retried,
        ended=fold.steps.ended.reason if fold.steps.ended is not None else None,
    )


def _judged(
    trajectory_id: str, member: Member, view: View, unnamed: Counter[str], group: str
) -> tuple[list[Violation], bool]:
    """Its violations, and whether a letter that names only its group buried it."""
    found, buried = list(member.faults), False
    for one in findings(member, view):
        if not one.due:
            continue
        if one.kind == "lost" and not member.resolutions and one.places[0].topic != "prompts":
            if not buried and unnamed[group] > 0:
                unnamed[group] -= 1
                buried = True
            if buried:
                continue
        places = tuple(map(str, one.places))
        found.append(
            Violation(kind=one.kind, trajectory_id=trajectory_id, place=places[0], detail=one.detail, places=places)
        )
    return found, buried


def _last_step(fold: Fold, old: Callable[[Place], bool]) -> Step | None:
    """The newest step that counts and of which all consequences have been read."""
    for step in reversed(fold.steps.window):
        if old(step.place):
            return step
    return fold.steps.evicted


def _unreadable(fold: Fold, view: View) -> Iterator[Violation]:
    for place, (key, error) in fold.unreadable.items():
        if place.topic not in _LETTERED or not (view.passed(place) and view.old(place)):
            continue
        if place not in view.letters.by_source and not view.letters.was_skipped(place):
            yield Violation(
                kind="lost",
                trajectory_id=key,
                place=str(place),
                detail=f"passed without a dead letter: {error}",
                places=(str(place),),
            )


def _unsettled(fold: Fold, reached: Reached) -> Callable[[Member, Place], bool]:
    """See View.unsettled."""
    rounds, ended = fold.steps.rounds, fold.steps.ended is not None
    whole: dict[int, int] = defaultdict(int)
    if ended:
        for member in fold.members.values():
            if not member.train and (member.scored or member.letters) and not member.resolutions:
                whole[member.round] += 1

    def unsettled(member: Member, place: Place) -> bool:
        known = rounds.get(member.round)
        if known is not None and known.followed is not None and reached.holds(known.followed):
            return True
        behind = place.offset < reached.trainer.get(TopicPartition(place.topic, place.partition), 0)
        return ended and behind and (known is not None or whole[member.round] >= member.round_size)

    return unsettled
