"""The ledger: one fate for every admitted (prompt, member), and whatever contradicts that.

>>> ledger = audit(log, codec, "run")                                                   # doctest: +SKIP
>>> ledger.balanced, ledger.trained, ledger.in_flight
(True, 1024, {'sampling': 96})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Ledger", "Place", "Skipped", "Stage", "Violation", "ViolationKind"]

Stage = Literal["queued", "sampling", "completed", "scored"]
"""Where a member in flight is: not taken by a rollout, in a rollout, waiting for reward, waiting for the trainer."""

ViolationKind = Literal[
    "admitted_twice",
    "after_end",
    "altered",
    "attempt_gap",
    "completed_twice",
    "conflict",
    "delta_gap",
    "ended_twice",
    "evaluated_twice",
    "fenced_step",
    "letter_twice",
    "lost",
    "moved_twice",
    "no_adopt",
    "no_completed",
    "no_end",
    "no_letter",
    "no_move",
    "no_result",
    "not_admitted",
    "not_prepared",
    "not_started",
    "offsets_back",
    "restarted",
    "run_ended_twice",
    "scored_twice",
    "stale",
    "started_twice",
    "step_missing",
    "step_twice",
    "trained_twice",
    "trainer_missing",
    "trainer_twice",
    "two_versions",
    "uncommitted_version",
    "unknown_version",
    "version_back",
    "wrong_owner",
    "wrong_version",
]


class Place(NamedTuple):
    """Where a record stands; prints as ``topic[partition]@offset``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One contradiction."""

    kind: ViolationKind
    trajectory_id: str
    """The member; for records of the run itself ``step 7``, ``version 3``, ``epoch 2``."""
    place: str
    """``topic[partition]@offset`` of the record that shows it."""
    detail: str
    places: tuple[str, ...] = ()
    """Every record concerned, ``place`` first."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.trajectory_id} at {self.place}: {self.detail}"

    def as_json(self) -> dict[str, Any]:
        """Ready for ``json.dumps``."""
        return {
            "kind": self.kind,
            "id": self.trajectory_id,
            "places": list(self.places or (self.place,)),
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Offsets that a group jumped over, as configured: retention had removed them."""

    group: str
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    """The first one that was not skipped."""

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.from_offset}..{self.to_offset - 1} by {self.group}"


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
    """1, unless weights change in flight."""
    mean_versions_per_trajectory: float
    """Over the results with tokens; 0 without any."""
    incomplete: tuple[str, ...]
    """Topics whose beginning retention has removed: nothing can be said to be lost then."""
    violations: tuple[Violation, ...]
    skipped: tuple[Skipped, ...] = ()
    """What was passed by configuration."""
    unknown: int = 0
    """Members of which something is there, but not their prompt, since its topic's beginning is gone."""
    retried: int = 0
    """Dead letters that were given back to the dataflow."""
    ended: str | None = None
    """Why the run ended; None: it did not, or it was resumed."""

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
            "mean_versions_per_trajectory": round(self.mean_versions_per_trajectory, 3),
            "incomplete": list(self.incomplete),
            "skipped": [str(one) for one in self.skipped],
            "unknown": self.unknown,
            "retried": self.retried,
            "ended": self.ended,
            "violations": [str(violation) for violation in self.violations],
            "violation_records": [violation.as_json() for violation in self.violations],
        }
