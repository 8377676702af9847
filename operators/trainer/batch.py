"""Assembly of groups from what arrives: a pure fold, so that a checkpoint can hold all of it.

Guarantees:

* A group is ready when each of its members is scored or dead; ready groups leave first in, first out.
* A group that left, or whose members all died, is done: whatever still arrives for it is counted and ignored, so the
  same batch delivered twice makes one step.
* Of two results for one member the newest attempt counts; the other one is counted as ``late`` (older attempt) or
  ``duplicate`` (same attempt).
* Evaluation answers never mix with training groups; they are collected by round.
* A dead letter that was retried (``Retry``) counts no more: its member is waited for again while its group is open,
  also where all of its members had died. If the group was consumed meanwhile, the member is in ``returned`` when it
  comes, and the next step drops it. Letters are folded before the results that they led to (see ``intake``).
* A letter that cannot say which member it was (``Death.unnamed``) closes a group of which something else came.

>>> state = Assembly()
>>> state = fold(state, arrival, group_size=8)                        # doctest: +SKIP
>>> groups, state = take(state, 16)                                   # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from laminar.operators.trainer.done import DoneGroups
from laminar.schemas.records import ScoredTrajectory, group_id_of
from laminar.streams.dead_letter import place_of
from laminar.streams.log import TopicPartition

__all__ = [
    "Answer",
    "Arrival",
    "Assembly",
    "Death",
    "Event",
    "Group",
    "Retry",
    "Round",
    "close_round",
    "fold",
    "lowest_offsets",
    "take",
    "take_returned",
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
    """Where the letter stands."""
    offset: int
    unnamed: bool = False
    """It stands for one member of the group, nobody knows which; its only id is made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A dead letter was retried: its members are in flight again."""

    source: TopicPartition
    """Where the letter stands."""
    offset: int
    trajectory_ids: tuple[str, ...]


Event = Arrival | Death | Retry


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
        if alive is None and self.unnamed:
            return False  # bytes under this key are all that there is: perhaps there is no such group
        return len(self.members) >= (alive.scored.trajectory.prompt.group_size if alive else group_size)

    @property
    def unnamed(self) -> bool:
        """Whether a letter settles a member that it could not name."""
        return any(isinstance(m, Death) and m.unnamed for m in self.members.values())

    @property
    def letters(self) -> frozenset[str]:
        """Places of the dead letters in it."""
        return frozenset(_place(m) for m in self.members.values() if isinstance(m, Death))


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
    """Training groups that were consumed."""
    lost: Mapping[str, Group] = field(default_factory=dict)
    """Training groups of which every member is dead, by group id."""
    buried: frozenset[str] = frozenset()
    """Dead letters in the groups that were consumed, ``partition@offset``."""
    unnamed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Consumed groups with a letter that named no member -> the members that do have their fate."""
    owed: frozenset[str] = frozenset()
    """Members given back to the dataflow after their group was consumed."""
    returned: tuple[Arrival, ...] = ()
    """Those of them that came: the next step drops them."""
    late: int = 0
    """Results of an older attempt."""
    duplicates: int = 0
    """Results that were known already."""


def fold(state: Assembly, event: Event, *, group_size: int) -> Assembly:
    """The state after one event. ``group_size``: of training groups (dead letters do not carry it)."""
    if isinstance(event, Death):
        return _death(state, event, group_size)
    if isinstance(event, Retry):
        return _retry(state, event)
    if event.scored.trajectory.prompt.purpose == "eval":
        return _answer(state, event)
    return _arrival(state, event, group_size)


def take(state: Assembly, n: int) -> tuple[tuple[Group, ...], Assembly]:
    """The ``n`` oldest ready groups (fewer if there are fewer), and the state in which they are done."""
    taken = tuple(state.groups[group_id] for group_id in state.ready[:n])
    done, buried, unnamed = state.done, state.buried, dict(state.unnamed)
    for group in taken:
        done = done.add(group.group_id)
        buried |= group.letters
        if group.unnamed:
            unnamed[group.group_id] = frozenset(group.members)
    left = {group_id: group for group_id, group in state.groups.items() if group_id not in state.ready[:n]}
    return taken, replace(state, groups=left, ready=state.ready[n:], done=done, buried=buried, unnamed=unnamed)


def take_returned(state: Assembly) -> tuple[tuple[Arrival, ...], Assembly]:
    """What came back for groups that were consumed without it, and the state in which that is settled."""
    return state.returned, replace(state, returned=())


def close_round(state: Assembly, number: int) -> Assembly:
    """The state after a round's result was written."""
    left = {n: r for n, r in state.rounds.items() if n != number}
    gone = state.rounds.get(number)
    closed = state.closed_rounds | {gone.prefix} if gone else state.closed_rounds
    return replace(state, rounds=left, closed_rounds=closed)


def lowest_offsets(state: Assembly, position: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Per partition the lowest offset that a waiting group holds, or the read position."""
    lowest = dict(position)
    waiting: list[Arrival | Death] = [m for group in state.groups.values() for m in group.members.values()]
    for member in (*waiting, *state.returned):
        if member.source in lowest:
            lowest[member.source] = min(lowest[member.source], member.offset)
    return lowest


def _arrival(state: Assembly, event: Arrival, group_size: int) -> Assembly:
    made = event.scored.trajectory
    if made.group_id in state.done:
        return _return(state, event)
    if made.group_id in state.lost:
        return replace(state, late=state.late + 1)
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


def _return(state: Assembly, event: Arrival) -> Assembly:
    """Something for a group or a round that is through."""
    made = event.scored.trajectory
    settled = state.unnamed.get(made.group_id)
    if made.trajectory_id in state.owed:
        state = replace(state, owed=state.owed - {made.trajectory_id})
    elif settled is not None and made.trajectory_id not in settled:
        # Perhaps the member that a letter could not name. If not, that letter stood for nobody.
        state = replace(state, unnamed={**state.unnamed, made.group_id: settled | {made.trajectory_id}})
    else:
        return replace(state, duplicates=state.duplicates + 1)
    return replace(state, returned=(*state.returned, event))


def _death(state: Assembly, event: Death, group_size: int) -> Assembly:
    prefix = event.group_id.rsplit("/", 1)[0]
    if event.group_id in state.lost:
        return state
    if event.group_id in state.done or prefix in state.closed_rounds:
        again = state.owed & set(event.trajectory_ids)  # it came back, and died once more
        if again:
            return replace(state, owed=state.owed - again, buried=state.buried | {_place(event)})
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
            return replace(state, groups=left, lost={**state.lost, group.group_id: group})
        ready = (*ready, group.group_id)
    return replace(state, groups={**state.groups, group.group_id: group}, ready=ready)


def _retry(state: Assembly, event: Retry) -> Assembly:
    """The letter is no fate any more."""
    place = _place(event)
    if place in state.buried:
        return replace(state, buried=state.buried - {place}, owed=state.owed | set(event.trajectory_ids))
    ids = frozenset(event.trajectory_ids)
    prefixes = {group_id_of(i).rsplit("/", 1)[0] for i in ids}
    if prefixes & state.closed_rounds:
        return replace(state, owed=state.owed | ids)
    rounds = {n: replace(known, dead=known.dead - ids) for n, known in state.rounds.items()}
    groups, lost, ready = dict(state.groups), dict(state.lost), state.ready
    for group_id, group in [*groups.items(), *lost.items()]:
        if place not in group.letters:
            continue
        left = {i: m for i, m in group.members.items() if isinstance(m, Arrival) or _place(m) != place}
        groups.pop(group_id, None)
        lost.pop(group_id, None)
        if left:
            groups[group_id] = replace(group, members=left)
        ready = tuple(g for g in ready if g != group_id)
    return replace(state, rounds=rounds, groups=groups, lost=lost, ready=ready)


def _place(event: Death | Retry) -> str:
    return place_of(event.source.partition, event.offset)


def _answer(state: Assembly, event: Arrival) -> Assembly:
    made = event.scored.trajectory
    prefix = made.group_id.rsplit("/", 1)[0]
    if prefix in state.closed_rounds:
        return _return(state, event)
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
