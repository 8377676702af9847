"""The conservation law: for every admitted (prompt, member) exactly one fate.

Pure: ``audit.py`` reads the topics and fills in what each says about a member; here that becomes a fate, and whatever
contradicts the law becomes a violation that names the member and the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from laminar.streams.log import TopicPartition

__all__ = [
    "Evidence",
    "Ledger",
    "Member",
    "Place",
    "Resolution",
    "Result",
    "Stage",
    "Violation",
    "ViolationKind",
    "settle",
]

Stage = Literal["queued", "sampling", "completed", "scored"]
"""Where a member in flight is: not taken by a rollout, in a rollout, waiting for reward, waiting for the trainer."""

ViolationKind = Literal[
    "admitted_twice",
    "completed_twice",
    "conflict",
    "lost",
    "no_result",
    "not_admitted",
    "scored_twice",
    "trained_twice",
    "two_versions",
]


class Place(NamedTuple):
    """Where a record stands; prints as ``topic[partition]@offset``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Result(NamedTuple):
    """A record on ``trajectories.completed`` or ``trajectories.scored``."""

    attempt: int
    place: Place


class Resolution(NamedTuple):
    """A surviving step, or an evaluation, that settled a member."""

    reason: str | None
    """None: trained; else why it was dropped."""
    place: Place


@dataclass(slots=True)
class Member:
    """All that the topics say about one (prompt, member)."""

    prompt: Place | None = None
    """None: never admitted."""
    train: bool = True
    """For training, not for evaluation."""
    started: Place | None = None
    attempt: int = 0
    """Of the newest owner."""
    ended: Place | None = None
    """The newest owner's end."""
    ended_attempt: int = -1
    ended_dead: bool = False
    late: int = 0
    """Ends of an older attempt than the newest known, or after another end: ignored."""
    completed: list[Result] = field(default_factory=list)
    scored: list[Result] = field(default_factory=list)
    letters: list[Place] = field(default_factory=list)
    resolutions: list[Resolution] = field(default_factory=list)


@dataclass(slots=True)
class Evidence:
    """What was read."""

    members: dict[str, Member] = field(default_factory=dict)
    passed: dict[TopicPartition, int] = field(default_factory=dict)
    """Per partition of prompts, completed and scored: the offset below which its consumer has settled everything."""
    unnamed_letters: Counter[str] = field(default_factory=Counter)
    """Group id -> dead letters that could not tell which member it was."""
    staleness: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    void_steps: int = 0
    undecodable: int = 0
    max_versions: int = 0
    incomplete: tuple[str, ...] = ()
    violations: list[Violation] = field(default_factory=list)

    def member(self, trajectory_id: str) -> Member:
        """The member's entry, made when it is new."""
        found = self.members.get(trajectory_id)
        if found is None:
            found = self.members[trajectory_id] = Member()
        return found

    def has_passed(self, place: Place) -> bool:
        """Whether the consumer of this record's topic is behind it for good."""
        return place.offset < self.passed.get(TopicPartition(place.topic, place.partition), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One contradiction."""

    kind: ViolationKind
    trajectory_id: str
    place: str
    """``topic[partition]@offset`` of the record that shows it."""
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.trajectory_id} at {self.place}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The result of an audit."""

    run_id: str
    admitted: int
    """(prompt, member) pairs."""
    trained: int
    dropped: Mapping[str, int]
    """Reason -> members."""
    dead: int
    in_flight: Mapping[Stage, int]
    """Stage -> members."""
    late: int
    """Results of an older attempt, or beyond the first: ignored by everyone."""
    steps: int
    """Optimizer steps that count."""
    void_steps: int
    """Recorded, then voided by a trainer that resumed below them."""
    undecodable: int
    """Records that are of no known schema, on any topic."""
    staleness: Mapping[int, int]
    """Versions -> trained trajectories."""
    max_versions_per_trajectory: int
    incomplete: tuple[str, ...]
    """Topics whose beginning retention has removed: nothing can be said to be lost then."""
    violations: tuple[Violation, ...]

    @property
    def balanced(self) -> bool:
        """Whether every admitted member has exactly one fate, and nothing else was trained on."""
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        """``ledger`` of ``summary.json`` and more, ready for ``json.dumps``."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "dead": self.dead,
            "in_flight": sum(self.in_flight.values()),
            "balanced": self.balanced,
            "stages": dict(self.in_flight),
            "late": self.late,
            "steps": self.steps,
            "void_steps": self.void_steps,
            "undecodable": self.undecodable,
            "staleness": {str(lag): n for lag, n in sorted(self.staleness.items())},
            "max_versions_per_trajectory": self.max_versions_per_trajectory,
            "incomplete": list(self.incomplete),
            "violations": [str(violation) for violation in self.violations],
        }


def settle(run_id: str, evidence: Evidence) -> Ledger:
    """One fate for each member, and what contradicts that."""
    violations = list(evidence.violations)
    unnamed = Counter(evidence.unnamed_letters)
    dropped: Counter[str] = Counter()
    in_flight: Counter[Stage] = Counter()
    trained = dead = admitted = late = 0
    for trajectory_id, member in sorted(evidence.members.items()):
        late += member.late
        violations += _contradictions(trajectory_id, member, evidence)
        if member.prompt is None:
            continue
        admitted += 1
        if member.resolutions:
            reasons = [r.reason for r in member.resolutions]
            if None in reasons:
                trained += 1
            else:
                dropped[str(reasons[0])] += 1
            continue
        if member.letters:
            dead += 1
            continue
        stage, loss = _stage(member, evidence)
        group_id = trajectory_id.rsplit("/", 1)[0]
        if loss is not None and unnamed[group_id] > 0:
            unnamed[group_id] -= 1
            dead += 1
            continue
        in_flight[stage] += 1
        if loss is not None and not evidence.incomplete:
            place, detail = loss
            violations.append(Violation(kind="lost", trajectory_id=trajectory_id, place=str(place), detail=detail))
    return Ledger(
        run_id=run_id,
        admitted=admitted,
        trained=trained,
        dropped=dict(dropped),
        dead=dead,
        in_flight=dict(in_flight),
        late=late,
        steps=evidence.steps,
        void_steps=evidence.void_steps,
        undecodable=evidence.undecodable,
        staleness=dict(evidence.staleness),
        max_versions_per_trajectory=evidence.max_versions,
        incomplete=evidence.incomplete,
        violations=tuple(violations),
    )


def _stage(member: Member, evidence: Evidence) -> tuple[Stage, tuple[Place, str] | None]:
    """Where a member without a fate is; and, if it can get none any more, where it was lost and how."""
    attempt = member.ended_attempt if member.ended is not None else member.attempt
    result = next((one for one in member.completed if one.attempt >= attempt), None)
    if result is not None:
        scored = next((one for one in member.scored if one.attempt == result.attempt), None)
        if scored is None:
            lost = evidence.has_passed(result.place)
            return "completed", (result.place, "passed by reward without a score or a dead letter") if lost else None
        lost = member.train and evidence.has_passed(scored.place)
        return "scored", (scored.place, "passed by the trainer, neither trained nor dropped") if lost else None
    if member.ended is not None:
        missing = "dead letter" if member.ended_dead else "completed trajectory"
        return "sampling", (member.ended, f"it ended without its {missing}")
    if member.started is not None:
        return "sampling", None
    assert member.prompt is not None
    lost = evidence.has_passed(member.prompt)
    return "queued", (member.prompt, "its prompt was taken, but it never started") if lost else None


def _contradictions(trajectory_id: str, member: Member, evidence: Evidence) -> Iterator[Violation]:
    def violation(kind: ViolationKind, place: Place, detail: str) -> Violation:
        return Violation(kind=kind, trajectory_id=trajectory_id, place=str(place), detail=detail)

    if member.prompt is None and not evidence.incomplete:
        seen = [r.place for r in member.resolutions] + member.letters + [r.place for r in member.scored]
        seen += [r.place for r in member.completed] + [p for p in (member.ended, member.started) if p is not None]
        if seen:
            yield violation("not_admitted", seen[0], "no prompt has this member")
    if len(member.resolutions) > 1:
        first, again = member.resolutions[:2]
        twice = first.reason is None and again.reason is None
        fates = [r.reason or "trained" for r in member.resolutions]
        yield violation(
            "trained_twice" if twice else "conflict", again.place, f"{' and '.join(fates)}; first at {first.place}"
        )
    if member.resolutions and member.letters and not member.late:
        fate = member.resolutions[0].reason or "trained"
        yield violation("conflict", member.letters[0], f"dead, and {fate} at {member.resolutions[0].place}")
    if member.resolutions and not member.scored and not evidence.incomplete:
        yield violation("no_result", member.resolutions[0].place, "settled by the trainer, but it was never scored")
    copies: tuple[tuple[ViolationKind, list[Result]], ...] = (
        ("completed_twice", member.completed),
        ("scored_twice", member.scored),
    )
    for kind, results in copies:
        attempts: dict[int, Place] = {}
        for one in results:
            if one.attempt in attempts:
                yield violation(kind, one.place, f"attempt {one.attempt} is also at {attempts[one.attempt]}")
            attempts.setdefault(one.attempt, one.place)
