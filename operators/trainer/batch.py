"""Assembly of groups from what arrives: a pure fold, so that a checkpoint can hold all of it.

Guarantees:

* A group is ready when each of its members is scored or dead; ready groups leave first in, first out.
* A group that left, or whose members all died, is done: whatever still arrives for it is counted and ignored, so the
  same batch delivered twice makes one step.
* Of two results for one member the newest attempt counts; the other one is counted as ``late`` (older attempt) or
  ``duplicate`` (same attempt).
* Evaluation answers never mix with training groups; they are collected by round.

>>> state = Assembly()
>>> state = fold(state, arrival, group_size=8)                        # doctest: +SKIP
>>> groups, state = take(state, 16)                                   # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from laminar.operators.trainer.done import DoneGroups
from laminar.schemas.records import ScoredTrajectory
from laminar.streams.log import TopicPartition

__all__ = [
    "Answer",
    "Arrival",
    "Assembly",
    "Death",
    "Event",
    "Group",
    "Round",
    "close_round",
    "fold",
    "lowest_offsets",
    "take",
]

_EVAL = "eval-"
"""How ``prompts`` begins the ids of evaluation prompts; needed where a dead letter is all there is of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A scored trajectory as it was read."""

    scored: ScoredTrajectory
    source: TopicPartition
    offset: int
    value: bytes
    """The record's framed bytes, for the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A dead letter that settles members."""

    group_id: str
    trajectory_ids: tuple[str, ...]
    source: TopicPartition
    offset: int


Event = Arrival | Death


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A training group of which at least one member is settled."""

    group_id: str
    members: Mapping[str, Arrival | Death] = field(default_factory=dict)
    """By trajectory id."""

    @property
    def scored(self) -> list[Arrival]:
        """What came in alive, in member order."""
        alive = [m for m in self.members.values() if isinstance(m, Arrival)]
        return sorted(alive, key=lambda a: a.scored.trajectory.member)

    def complete(self, group_size: int) -> bool:
        """Whether every member is settled. ``group_size`` counts where no member tells its own."""
        alive = next((m for m in self.members.values() if isinstance(m, Arrival)), None)
        return len(self.members) >= (alive.scored.trajectory.prompt.group_size if alive else group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of an evaluation round, reduced to what the result needs."""

    trajectory_id: str
    reward: float | None
    version: int
    """Oldest policy version in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One evaluation round."""

    size: int
    """Answers that it has when it is complete."""
    prefix: str
    """Of its group ids, which its dead letters carry too."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every member is settled."""
        return len(self.answers) + len(self.dead - self.answers.keys()) >= self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """All that came in and was not consumed yet."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    """Incomplete and ready ones, by group id."""
    ready: tuple[str, ...] = ()
    """Complete ones, in the order in which they became complete."""
    rounds: Mapping[int, Round] = field(default_factory=dict)
    """Evaluation rounds that are not written yet."""
    closed_rounds: frozenset[str] = frozenset()
    """Prefixes of rounds that are written."""
    done: DoneGroups = field(default_factory=DoneGroups)
    """Training groups that were consumed or lost."""
    late: int = 0
    """Results of an older attempt."""
    duplicates: int = 0
    """Results that were known already."""


def fold(state: Assembly, event: Event, *, group_size: int) -> Assembly:
    """The state after one event. ``group_size``: of training groups (dead letters do not carry it)."""
    if isinstance(event, Death):
        return _death(state, event, group_size)
    if event.scored.trajectory.prompt.purpose == "eval":
        return _answer(state, event)
    return _arrival(state, event, group_size)


def take(state: Assembly, n: int) -> tuple[tuple[Group, ...], Assembly]:
    """The ``n`` oldest ready groups (fewer if there are fewer), and the state in which they are done."""
    taken = state.ready[:n]
    done = state.done
    for group_id in taken:
        done = done.add(group_id)
    left = {group_id: group for group_id, group in state.groups.items() if group_id not in taken}
    return tuple(state.groups[g] for g in taken), replace(state, groups=left, ready=state.ready[n:], done=done)


def close_round(state: Assembly, number: int) -> Assembly:
    """The state after a round's result was written."""
    left = {n: r for n, r in state.rounds.items() if n != number}
    gone = state.rounds.get(number)
    closed = state.closed_rounds | {gone.prefix} if gone else state.closed_rounds
    return replace(state, rounds=left, closed_rounds=closed)


def lowest_offsets(state: Assembly, position: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Per partition the lowest offset that a waiting group holds, or the read position."""
    lowest = dict(position)
    for group in state.groups.values():
        for member in group.members.values():
            if member.source in lowest:
                lowest[member.source] = min(lowest[member.source], member.offset)
    return lowest


def _arrival(state: Assembly, event: Arrival, group_size: int) -> Assembly:
    made = event.scored.trajectory
    if made.group_id in state.done:
        return replace(state, duplicates=state.duplicates + 1)
    group = state.groups.get(made.group_id, Group(group_id=made.group_id))
    known = group.members.get(made.trajectory_id)
    if isinstance(known, Arrival):
        newer = made.attempt > known.scored.trajectory.attempt
        if made.attempt == known.scored.trajectory.attempt:
            return replace(state, duplicates=state.duplicates + 1)
        state = replace(state, late=state.late + 1)
        if not newer:
            return state
    elif known is not None:
        return replace(state, late=state.late + 1)
    return _settle(state, group, {made.trajectory_id: event}, group_size)


def _death(state: Assembly, event: Death, group_size: int) -> Assembly:
    prefix = event.group_id.rsplit("/", 1)[0]
    if event.group_id in state.done or prefix in state.closed_rounds:
        return state
    for number, known in state.rounds.items():
        if known.prefix == prefix:
            dead = replace(known, dead=known.dead | set(event.trajectory_ids))
            return replace(state, rounds={**state.rounds, number: dead})
    if event.group_id.startswith(_EVAL):
        group_size = sys.maxsize
    group = state.groups.get(event.group_id, Group(group_id=event.group_id))
    return _settle(state, group, {i: event for i in event.trajectory_ids if i not in group.members}, group_size)


def _settle(state: Assembly, group: Group, members: Mapping[str, Arrival | Death], group_size: int) -> Assembly:
    group = replace(group, members={**group.members, **members})
    ready = state.ready
    if group.group_id not in ready and group.complete(group_size):
        if not group.scored:
            left = {g: known for g, known in state.groups.items() if g != group.group_id}
            return replace(state, groups=left, done=state.done.add(group.group_id))
        ready = (*ready, group.group_id)
    return replace(state, groups={**state.groups, group.group_id: group}, ready=ready)


def _answer(state: Assembly, event: Arrival) -> Assembly:
    made = event.scored.trajectory
    prefix = made.group_id.rsplit("/", 1)[0]
    if prefix in state.closed_rounds:
        return replace(state, duplicates=state.duplicates + 1)
    number = made.prompt.epoch
    known = state.rounds.get(number) or Round(size=made.prompt.round_size, prefix=prefix)
    if made.trajectory_id in known.answers:
        return replace(state, duplicates=state.duplicates + 1)
    # Dead letters that came before the round's first answer look like those of a training group.
    early = {g: group for g, group in state.groups.items() if not group.scored and g.rsplit("/", 1)[0] == prefix}
    dead = known.dead | {i for group in early.values() for i in group.members}
    answer = Answer(trajectory_id=made.trajectory_id, reward=event.scored.reward, version=made.version_min)
    grown = replace(known, answers={**known.answers, made.trajectory_id: answer}, dead=dead)
    left = {g: group for g, group in state.groups.items() if g not in early}
    return replace(state, groups=left, rounds={**state.rounds, number: grown})
