"""All that the topics say about one (prompt, member), while it may still change.

Its lifecycle events stand on one partition, so they come in order and are checked as they come; what the other topics
say comes in any order and is only kept, for ``rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from laminar.schemas import records as r
from laminar.streams.audit.letters import Letter
from laminar.streams.audit.peek import Delta, Done, Started
from laminar.streams.ledger import Place, Violation, ViolationKind

__all__ = ["End", "Member", "Owner", "Resolution", "Result", "apply_event"]

_Fault = Callable[..., None]
_Known = Callable[[int, str], None]


class Owner(NamedTuple):
    """Who owns an attempt from a record on."""

    attempt: int
    rollout_id: str
    incarnation: int
    """0: nobody."""
    place: Place
    version: int = -1
    """Of the rollout that took the group; -1: it is not said."""
    moved: str = ""
    """Why it left the owner before; ``""``: there was none."""
    pinned: bool = True
    """The rollout that took the group loads new weights with nothing in the engine."""


class End(NamedTuple):
    """A TrajectoryEnded."""

    attempt: int
    dead: bool
    n_tokens: int
    place: Place


class Result(NamedTuple):
    """A record on ``trajectories.completed`` or ``trajectories.scored``."""

    done: Done
    place: Place


class Resolution(NamedTuple):
    """A surviving step, or an evaluation, that settled the member."""

    reason: str | None
    """None: trained; else why it was dropped."""
    place: Place
    version: int
    """Of the trainer before the step; -1: an evaluation."""


@dataclass(slots=True, eq=False)
class Member:
    """See the module's docstring. Tuples, since most of them stay empty."""

    prompts: tuple[Place, ...] = ()
    train: bool = True
    round: int = 0
    round_size: int = 0
    group_size: int = 1
    min_version: int = 0
    owners: tuple[Owner, ...] = ()
    """One for each Started and Moved, in order."""
    attempt: int = -1
    """Of the newest owner."""
    n_tokens: int | None = 0
    """In the newest owner's deltas; None: the log does not tell."""
    contested: bool = False
    """Two owners were named for the newest attempt."""
    ends: tuple[End, ...] = ()
    end: End | None = None
    """The newest owner's, or an older one's that was the newest then."""
    late: int = 0
    """Ends of an older attempt than the newest known, or before another end: ignored."""
    adopts: tuple[Owner, ...] = ()
    completed: tuple[Result, ...] = ()
    scored: tuple[Result, ...] = ()
    letters: tuple[Letter, ...] = ()
    resolutions: tuple[Resolution, ...] = ()
    firm: bool = False
    """Its resolution is not taken back any more by a trainer that resumes from a recent checkpoint."""
    faults: list[Violation] = field(default_factory=list)
    """What its lifecycle events contradict by themselves."""


def apply_event(
    trajectory_id: str,
    member: Member,
    event: Started | Delta | r.TrajectoryMoved | r.TrajectoryEnded,
    place: Place,
    *,
    lenient: bool,
) -> None:
    """The next record of its partition of ``trajectories.partial``. ``lenient``: the topic's beginning is gone."""

    def fault(kind: ViolationKind, detail: str, *others: Place) -> None:
        places = (str(place), *map(str, others))
        member.faults.append(
            Violation(kind=kind, trajectory_id=trajectory_id, place=places[0], detail=detail, places=places)
        )

    def known_attempt(expected: int, what: str) -> None:
        if event.attempt <= expected:
            return
        if member.attempt < 0 and not isinstance(event, Started):
            if not lenient:
                fault("not_started", f"{what} of attempt {event.attempt}, but it never started")
        elif not lenient or member.attempt >= 0:
            before = [one.place for one in member.owners[-1:]]
            fault("attempt_gap", f"{what} of attempt {event.attempt}, the newest owner is of {member.attempt}", *before)
        member.n_tokens = None
        member.attempt = event.attempt

    if isinstance(event, Delta):
        known_attempt(member.attempt, "tokens")
        if event.attempt < member.attempt:
            return
        if member.end is not None and member.end.attempt == event.attempt and not member.contested:
            fault("after_end", f"tokens of attempt {event.attempt} after its end", member.end.place)
        elif member.n_tokens is not None and event.start != member.n_tokens and not member.contested:
            fault("delta_gap", f"tokens from {event.start} on, but {member.n_tokens} are known")
        member.n_tokens = event.start + event.n_tokens
    elif isinstance(event, Started):
        _started(member, event, place, fault, known_attempt)
    elif isinstance(event, r.TrajectoryMoved):
        _moved(member, event, place, fault, known_attempt)
    else:
        _ended(member, event, place, fault, known_attempt)


def _started(member: Member, event: Started, place: Place, fault: _Fault, known: _Known) -> None:
    if event.attempt <= member.attempt:
        others = [one.place for one in member.owners if one.attempt == event.attempt]
        fault("started_twice", f"attempt {event.attempt} again; the newest is {member.attempt}", *others)
    else:
        known(member.attempt + 1, "a start")
        member.attempt, member.n_tokens, member.end, member.contested = event.attempt, 0, None, False
    owner = Owner(event.attempt, event.rollout_id, event.incarnation, place, event.version, pinned=event.pinned)
    member.owners = (*member.owners, owner)


def _moved(member: Member, event: r.TrajectoryMoved, place: Place, fault: _Fault, known: _Known) -> None:
    owner = Owner(event.attempt, event.to_rollout, event.to_incarnation, place, moved=event.reason)
    same = [one for one in member.owners if one.attempt == event.attempt]
    if twin := next((one for one in same if one._replace(place=place) == owner), None):
        fault("moved_twice", f"to {event.to_rollout} in attempt {event.attempt} again", twin.place)
    elif event.attempt <= member.attempt:
        member.contested = member.contested or (event.attempt == member.attempt and event.to_incarnation != 0)
    else:
        known(member.attempt + (2 if event.reason == "dead" else 1), "a move")
        if member.n_tokens is not None and event.n_tokens > member.n_tokens and not member.contested:
            fault("delta_gap", f"moved with {event.n_tokens} tokens, but {member.n_tokens} are known")
        member.attempt, member.n_tokens, member.contested = event.attempt, event.n_tokens, False
    member.owners = (*member.owners, owner)


def _ended(member: Member, event: r.TrajectoryEnded, place: Place, fault: _Fault, known: _Known) -> None:
    known(member.attempt, "an end")
    end = End(event.attempt, event.finish is None, event.n_tokens, place)
    twin = next((one for one in member.ends if one.attempt == end.attempt), None)
    member.ends = (*member.ends, end)
    if twin is not None:
        fault("ended_twice", f"attempt {end.attempt} again", twin.place)
        return
    if end.attempt < member.attempt:
        member.late += 1
        return
    if member.n_tokens is not None and end.n_tokens < member.n_tokens and not member.contested:
        fault("delta_gap", f"ended with {end.n_tokens} tokens, but its deltas have {member.n_tokens}")
    if member.end is not None:
        member.late += 1  # the older end was valid when it was written; the newest owner's counts
    member.end = end
