"""The conservation law for one member: what its facts contradict, what they still lack, and what became of it.

Pure functions of the facts, whatever the order in which they were read. What is lacking is a violation only where it
must be there by now: its reason was on the log before the reading began (``View.old``), and, where a consumer is to
supply it, that consumer is behind the reason for good (``View.passed``). docs/architecture.md says what is legal: a
zombie's results, an end that a move overtook, a letter that was given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from laminar.streams.audit.letters import LetterBook
from laminar.streams.audit.member import Member, Owner, Result
from laminar.streams.audit.peek import Done
from laminar.streams.audit.versions import Numbers, VersionBook
from laminar.streams.ledger import Place, Stage, ViolationKind

__all__ = ["Finding", "View", "findings", "stage", "standing"]


class Finding(NamedTuple):
    """Something that is not right, or not right yet."""

    kind: ViolationKind
    places: tuple[Place, ...]
    detail: str
    due: bool
    """False: it may still come right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a member is judged by, besides its own facts."""

    old: Callable[[Place], bool]
    """Whether whatever this record needs has been read, if it is there."""
    passed: Callable[[Place], bool]
    """Whether the consumer of this record's topic is behind it for good."""
    unsettled: Callable[[Member, Place], bool]
    """Whether the trainer has passed this evaluation answer and closed its round without it."""
    letters: LetterBook
    versions: VersionBook
    made: Numbers
    max_staleness: int | None
    gone: frozenset[str]
    """Topics whose beginning retention has removed."""

    @property
    def incomplete(self) -> bool:
        """Whether nothing can be said to be lost."""
        return bool(self.gone - {"rollouts.commands"})


def findings(member: Member, view: View) -> Iterator[Finding]:
    """All of them; none: the member's story is whole, and nothing is expected any more."""
    yield from _beginning(member, view)
    yield from _ownership(member, view)
    yield from _ends(member, view)
    yield from _results(member, view)
    yield from _scores(member, view)
    yield from _fates(member, view)


def standing(member: Member, view: View) -> list[Place]:
    """Where the letters stand that are its fate."""
    named = [one.place for one in member.letters if one.retried is None]
    if named:
        return named
    by_place = [view.letters.standing(one.place) for one in member.completed + member.scored]
    by_place += [view.letters.standing(place) for place in member.prompts]
    return [one.place for one in by_place if one is not None]


def stage(member: Member) -> Stage:
    """Where a member without a fate is."""
    attempt = member.end.attempt if member.end is not None else member.attempt
    results = [one for one in member.completed if one.done.attempt >= attempt]
    if not results:
        return "sampling" if member.owners else "queued"
    attempts = {one.done.attempt for one in results}
    return "scored" if any(one.done.attempt in attempts for one in member.scored) else "completed"


def _beginning(member: Member, view: View) -> Iterator[Finding]:
    retries = sum(one.retried is not None and one.source.topic == "prompts" for one in member.letters)
    if len(member.prompts) > 1 + retries:
        first, *_, again = sorted(member.prompts)
        yield Finding("admitted_twice", (again, first), f"its prompt is also at {first}", view.old(again))
    if view.incomplete:
        return
    seen = _places(member)
    if not member.prompts:
        if seen:
            yield Finding("not_admitted", (seen[0],), "no prompt has this member", any(map(view.old, seen)))
        return
    if member.owners:
        return
    if seen:
        if member.completed or member.adopts:
            first = (member.completed or member.adopts)[0].place
            yield Finding("not_started", (first,), "nothing says that it started", view.old(first))
        return
    prompt = max(member.prompts)
    taken = view.passed(prompt) and not standing(member, view) and not view.letters.was_skipped(prompt)
    yield Finding("lost", (prompt,), "its prompt was taken, but it never started", taken and view.old(prompt))


def _places(member: Member) -> list[Place]:
    """Of everything but its prompt, the most telling first."""
    seen = [one.place for one in member.resolutions] + [one.place for one in member.letters]
    seen += [one.place for one in member.scored] + [one.place for one in member.completed]
    return seen + [one.place for one in member.ends] + [one.place for one in member.owners + member.adopts]


def _ownership(member: Member, view: View) -> Iterator[Finding]:
    """A move and its Adopt are one transaction, so is a retry of a letter and the new start."""
    if "trajectories.partial" in view.gone:
        return
    moves = [one for one in member.owners if one.moved and one.incarnation]
    n_moves, n_adopts = Counter(one[:3] for one in moves), Counter(one[:3] for one in member.adopts)
    if n_moves != n_adopts:
        for one in moves:
            if n_moves[one[:3]] > n_adopts[one[:3]] and "rollouts.commands" not in view.gone:
                detail = f"moved to {one.rollout_id} in attempt {one.attempt}, which was never told to adopt it"
                yield Finding("no_adopt", (one.place,), detail, view.old(one.place))
        for one in member.adopts:
            if n_adopts[one[:3]] > n_moves[one[:3]]:
                detail = f"{one.rollout_id} was told to adopt it in attempt {one.attempt}, but it never moved there"
                yield Finding("no_move", (one.place,), detail, view.old(one.place))
    again = [one for one in member.owners if not one.moved and one.attempt > 0]
    given_back = [one for one in member.letters if one.retried is not None and one.source.offset < 0]
    if len(again) > len(given_back):
        at = again[-1].place
        yield Finding("restarted", (at,), "started again, but no letter of it was given back", view.old(at))
    elif len(given_back) > len(again):
        decided = [one.retried for one in given_back if one.retried is not None]
        detail = "its letter was given back, but it did not start again"
        yield Finding("lost", (max(decided), given_back[-1].place), detail, view.old(max(decided)))


def _ends(member: Member, view: View) -> Iterator[Finding]:
    if view.incomplete:
        return
    finished = {one.done.attempt for one in member.completed}
    for end in member.ends:
        if not end.dead and end.attempt not in finished:
            yield Finding("lost", (end.place,), "it ended without its completed trajectory", view.old(end.place))
    dead = [one for one in member.ends if one.dead]
    letters = [one for one in member.letters if one.source.offset < 0 and one.source.topic == "trajectories.partial"]
    if len(dead) > len(letters):
        at = dead[-1].place
        yield Finding("lost", (at,), "it ended without its dead letter", view.old(at))
    elif len(letters) > len(dead):
        at = max(one.place for one in letters)
        yield Finding("no_end", (at,), f"{len(letters)} dead letters, {len(dead)} dead ends", view.old(at))


def _results(member: Member, view: View) -> Iterator[Finding]:
    ends = {one.attempt: one for one in member.ends if not one.dead}
    scores = Counter(one.done.attempt for one in member.scored)
    groups: dict[int, list[Result]] = {}
    for result in member.completed:
        groups.setdefault(result.done.attempt, []).append(result)
    for attempt, copies in groups.items():
        copies.sort(key=lambda one: one.place)
        result = copies[-1]
        known = [view.letters.by_source.get(one.place, []) for one in copies]
        retries = sum(any(letter.retried is not None for letter in letters) for letters in known)
        if len(copies) > 1 + retries:
            detail = f"attempt {attempt} is also at {copies[0].place}"
            places = (result.place, *(one.place for one in copies[:-1]))
            yield Finding("completed_twice", places, detail, view.old(result.place))
        if not view.incomplete:
            end = ends.get(attempt)
            if end is None:
                detail = f"attempt {attempt} is completed, but did not end"
                yield Finding("no_end", (result.place,), detail, view.old(result.place))
            elif end.n_tokens != result.done.n_tokens:
                detail = f"{result.done.n_tokens} tokens, but its end has {end.n_tokens}"
                yield Finding("altered", (result.place, end.place), detail, True)
            yield from _owner(member, result, view)
            passed = [one.place for one in copies if view.passed(one.place)]
            skipped = sum(view.letters.was_skipped(place) for place in passed)
            if len(copies) > scores[attempt] + sum(map(bool, known)) + skipped:
                due = len(passed) > scores[attempt] + sum(map(bool, known)) + skipped and view.old(result.place)
                detail = "passed by reward without a score or a dead letter"
                yield Finding("lost", (max(passed, default=result.place),), detail, due)
        yield from _sampled_by(member, result, view)


def _owner(member: Member, result: Result, view: View) -> Iterator[Finding]:
    owners = [one for one in member.owners if one.attempt == result.done.attempt]
    if not any(one.rollout_id == result.done.rollout_id and one.incarnation for one in owners):
        names = ", ".join(one.rollout_id if one.incarnation else "nobody" for one in owners) or "nobody known"
        detail = f"completed by {result.done.rollout_id}, but attempt {result.done.attempt} belongs to {names}"
        places = (result.place, *(one.place for one in owners))
        yield Finding("wrong_owner", places, detail, view.old(result.place))


def _sampled_by(member: Member, result: Result, view: View) -> Iterator[Finding]:
    done = result.done
    if not done.n_tokens:
        return
    first = member.owners[0] if member.owners else None
    if first is not None and not (first.version >= 0 and first.attempt == done.attempt):
        first = None  # which version its owner held is not said
    if first is not None and _is_wrong(done, first):
        detail = f"sampled by version {done.version_min}, but its owner held {first.version}"
        yield Finding("wrong_version", (result.place, first.place), detail, True)
    if done.pinned and done.version_min != done.version_max:
        begun = [one for one in member.owners if not one.moved]
        if all(one.pinned for one in begun):  # not one that a change of the setting overtook
            detail = f"sampled by versions {done.version_min} to {done.version_max} although versions are pinned"
            yield Finding("two_versions", (result.place,), detail, view.old(result.place))
    if member.prompts and done.version_min < member.min_version:
        detail = f"sampled by version {done.version_min}, its prompt asks for {member.min_version} or newer"
        yield Finding("wrong_version", (result.place, member.prompts[0]), detail, True)
    for version in sorted({done.version_min, done.version_max}):
        fault = view.versions.fault_of(version, view.made)
        if fault is not None:
            yield Finding(fault[0], (result.place,), fault[1], view.old(result.place))


def _is_wrong(done: Done, first: Owner) -> bool:
    """Whether its only owner cannot have sampled it by this version."""
    if done.version_min < first.version:
        return True
    return first.pinned and done.pinned and done.version_min == done.version_max != first.version


def _scores(member: Member, view: View) -> Iterator[Finding]:
    groups: dict[int, list[Result]] = {}
    for result in member.scored:
        groups.setdefault(result.done.attempt, []).append(result)
    for attempt, copies in groups.items():
        copies.sort(key=lambda one: one.place)
        result = copies[-1]
        sources = [one for one in member.completed if one.done.attempt == attempt]
        if not sources:
            if not view.incomplete:
                detail = f"attempt {attempt} is scored, but was not completed"
                yield Finding("no_completed", (result.place,), detail, view.old(result.place))
        elif any(one.done != result.done for one in sources):
            detail = "differs from the completed trajectory"
            yield Finding("altered", (result.place, sources[0].place), detail, True)
        known = [view.letters.by_source.get(one.place, []) for one in copies]
        retries = sum(any(letter.retried is not None for letter in letters) for letters in known)
        if len(copies) > 1 + retries:
            detail = f"attempt {attempt} is also at {copies[0].place}"
            places = (result.place, *(one.place for one in copies[:-1]))
            yield Finding("scored_twice", places, detail, view.old(result.place))


def _fates(member: Member, view: View) -> Iterator[Finding]:
    settled = sorted(member.resolutions, key=lambda one: one.place)
    dead = standing(member, view)
    if len(settled) > 1:
        first, again = settled[:2]
        twice = first.reason is None and again.reason is None
        fates = " and ".join(one.reason or "trained" for one in settled)
        places = (again.place, first.place, *(one.place for one in settled[2:]))
        yield Finding("trained_twice" if twice else "conflict", places, f"{fates}; first at {first.place}", True)
    if settled:
        fate = settled[0]
        if not member.scored and not view.incomplete:
            detail = "settled by the trainer, but it was never scored"
            yield Finding("no_result", (fate.place,), detail, view.old(fate.place))
        if dead and not _lives_on(member, view):
            detail = f"dead, and {fate.reason or 'trained'} at {fate.place}"
            yield Finding("conflict", (dead[0], fate.place), detail, True)
        if fate.reason is None and member.prompts and not member.train:
            places = (fate.place, *member.prompts)
            yield Finding("conflict", places, "an answer for evaluation was trained on", True)
        if fate.reason is None and view.max_staleness is not None and member.scored:
            lag = fate.version - max(one.done.version_min for one in member.scored)
            if lag > view.max_staleness:
                detail = f"trained {lag} versions late; max_staleness is {view.max_staleness}"
                yield Finding("stale", (fate.place, member.scored[0].place), detail, True)
    elif not dead and member.scored and not view.incomplete:
        for result in member.scored:
            if member.train:
                lost = view.passed(result.place) and not view.letters.was_skipped(result.place)
            else:
                lost = not member.letters and view.unsettled(member, result.place)
            if lost:
                detail = "passed by the trainer, neither trained nor dropped"
                yield Finding("lost", (result.place,), detail, view.old(result.place))
                break


def _lives_on(member: Member, view: View) -> bool:
    """Whether some attempt has a result and no dead letter of its own."""
    killed = {one.attempt for one in member.ends if one.dead}
    for letter in member.letters:
        if letter.retried is None and letter.source.offset >= 0:
            about = {one.done.attempt for one in member.completed + member.scored if one.place == letter.source}
            if not about:
                return False
            killed |= about
    return any(one.done.attempt not in killed and view.letters.standing(one.place) is None for one in member.scored)
