"""Every record of a real run, taken out, doubled or changed: the audit says so, or it is listed here why it cannot.

The run was made by the operators themselves: moves, adoptions, a drain, a trainer that resumed below a recorded step,
dead letters (one retried, one dropped), stale trajectories, two evaluation rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens
from laminar.streams.audit import audit
from laminar.streams.ledger import Ledger
from laminar.streams.log import LogRecord
from tests.support.recorded import Recording, recorded

Mutation = Callable[[Any], r.Record]

IGNORED = {
    "RolloutStatus": "heartbeats say nothing about a member's fate",
    "ReleaseCommand": "an order that nobody has to follow; what comes of it is a Moved",
}
REMOVED: dict[str, set[str]] = {
    "AdoptCommand": {"no_adopt"},
    "CompletedTrajectory": {"lost", "no_completed"},
    "DeadLetter": {"lost", "no_letter"},
    "DeadLetterSettled": {"no_letter", "restarted"},
    "Evaluation": {"lost"},
    "Prompt": {"not_admitted"},
    "ScoredTrajectory": {"lost", "no_result"},
    "TrainerStarted": {"trainer_missing"},
    "TrainingStep": {"step_missing"},
    "TrajectoryEnded": {"no_end"},
    "TrajectoryMoved": {"attempt_gap", "no_move"},
    "TrajectoryStarted": {"not_started", "attempt_gap"},
    "TrajectoryTokens": {"delta_gap"},
    "VersionManifest": {"not_prepared", "uncommitted_version"},
}
"""Record -> violations of which one at least must come."""
DOUBLED: dict[str, set[str]] = {
    "AdoptCommand": {"no_move"},
    "CompletedTrajectory": {"completed_twice"},
    "DeadLetter": {"no_end"},
    "Evaluation": {"evaluated_twice"},
    "Prompt": {"admitted_twice"},
    "RunEnded": {"run_ended_twice"},
    "ScoredTrajectory": {"scored_twice"},
    "TrainerStarted": {"trainer_twice"},
    "TrainingStep": {"step_twice", "fenced_step"},
    "TrajectoryEnded": {"ended_twice"},
    "TrajectoryMoved": {"moved_twice"},
    "TrajectoryStarted": {"started_twice"},
    "TrajectoryTokens": {"after_end"},
}


@pytest.fixture(scope="module")
def run() -> Recording:
    return recorded()


def name_of(run: Recording, record: LogRecord) -> str:
    return type(run.decoded(record)).__name__


@cache
def newest_attempts() -> dict[str, int]:
    run = recorded()
    found: dict[str, int] = {}
    for record in run.records:
        event = run.decoded(record)
        if isinstance(event, r.TrajectoryEnded):
            found[event.trajectory_id] = max(event.attempt, found.get(event.trajectory_id, -1))
    return found


def why_not_seen_when_removed(run: Recording, record: LogRecord) -> str | None:
    """By design there is nothing to see."""
    event = run.decoded(record)
    if isinstance(event, r.RunEnded):
        return "a run without an end is one that was stopped"
    if isinstance(event, r.DeadLetterSettled) and event.action == "drop":
        return "a letter that was dropped, and one that nobody has decided about, are the same fate"
    if isinstance(event, r.TrajectoryTokens):
        later = [
            other
            for other in map(run.decoded, run.records[run.records.index(record) + 1 :])
            if isinstance(other, r.TrajectoryTokens | r.TrajectoryMoved | r.TrajectoryEnded)
            and other.trajectory_id == event.trajectory_id
        ]
        if isinstance(later[0], r.TrajectoryEnded):
            return "the last tokens before the end: an end may bring tokens of its own, and the whole response follows"
    if isinstance(event, r.VersionManifest):
        if record.offset == 0:
            return "a compacted topic may begin at any manifest"
        versions = {c.version_min for c in map(run.decoded, run.records) if isinstance(c, r.CompletedTrajectory)}
        if event.state == "committed" and event.version not in versions:
            return "nothing was sampled by this version: a publication may be overtaken by the next"
    return None


def why_not_seen_when_doubled(run: Recording, record: LogRecord) -> str | None:
    event = run.decoded(record)
    if isinstance(event, r.DeadLetterSettled):
        return "of several decisions only the first counts"
    if isinstance(event, r.VersionManifest):
        return "a publication whose outcome was unknown is repeated"
    if isinstance(event, r.TrajectoryTokens) and event.attempt < newest_attempts()[event.trajectory_id]:
        return "tokens of an attempt that is over are ignored"
    return None


def kinds(ledger: Ledger) -> set[str]:
    return {violation.kind for violation in ledger.violations}


def doubled(records: Sequence[LogRecord], record: LogRecord) -> list[LogRecord]:
    """With a copy at the end of its partition."""
    end = 1 + max(one.offset for one in records if one.source == record.source)
    return [*records, replace(record, offset=end)]


def test_the_run_is_balanced_and_holds_every_kind_of_record_that_an_audit_reads(run: Recording) -> None:
    ledger = run.ledger(run.records)
    assert ledger.violations == ()
    assert ledger.trained > 0
    assert ledger.dropped["eval"] > 0
    assert ledger.dropped["stale"] > 0
    assert (ledger.dead, ledger.retried, ledger.void_steps, ledger.in_flight) == (2, 1, 1, {})
    assert {name_of(run, one) for one in run.records} == {*REMOVED, *DOUBLED, *IGNORED}
    moves = Counter(m.reason for m in map(run.decoded, run.records) if isinstance(m, r.TrajectoryMoved))
    assert moves["dead"] > 0
    assert moves["drain"] > 0


def test_b15_any_record_that_is_removed_is_missed(run: Recording) -> None:
    wrong, seen = [], Counter[str]()
    for at, record in enumerate(run.records):
        name = name_of(run, record)
        found = kinds(run.ledger(run.records[:at] + run.records[at + 1 :]))
        if name in IGNORED or why_not_seen_when_removed(run, record) is not None:
            if found:
                wrong.append(f"{record.where} {name}: {found} although it should not be seen")
        elif not found & REMOVED[name]:
            wrong.append(f"{record.where} {name}: {found}")
        else:
            seen[name] += 1
    assert wrong == []
    assert seen.keys() == REMOVED.keys()


def test_b15_any_record_that_is_doubled_is_noticed(run: Recording) -> None:
    wrong, seen = [], Counter[str]()
    for record in run.records:
        name = name_of(run, record)
        found = kinds(run.ledger(doubled(run.records, record)))
        if name in IGNORED or why_not_seen_when_doubled(run, record) is not None:
            if found:
                wrong.append(f"{record.where} {name}: {found} although it should not be seen")
        elif not found & DOUBLED[name]:
            wrong.append(f"{record.where} {name}: {found}")
        else:
            seen[name] += 1
    assert wrong == []
    assert seen.keys() == DOUBLED.keys()


def other_version(done: r.CompletedTrajectory, version: int) -> r.CompletedTrajectory:
    response = done.response
    sampled = Tokens.build(ids=response.ids_T.tolist(), logprobs=response.logprobs_T.tolist(), version=version)
    return replace(done, response=sampled, version_min=version, version_max=version)


def mixed(done: r.CompletedTrajectory) -> r.CompletedTrajectory:
    other = other_version(done, done.version_min + 1)
    both = Tokens.concat([done.response[:1], other.response[1:]])
    return replace(done, response=both, version_max=done.version_min + 1)


ALTERED: list[tuple[str, str, Mutation, set[str]]] = [
    ("CompletedTrajectory", "a version that was never made", lambda d: other_version(d, 99), {"unknown_version"}),
    ("CompletedTrajectory", "another version", lambda d: other_version(d, d.version_min + 1), {"altered"}),
    ("CompletedTrajectory", "two versions", mixed, {"two_versions"}),
    ("CompletedTrajectory", "another rollout", lambda d: replace(d, rollout_id="rollout-9"), {"wrong_owner"}),
    ("CompletedTrajectory", "another attempt", lambda d: replace(d, attempt=d.attempt + 1), {"no_end"}),
    (
        "CompletedTrajectory",
        "fewer tokens",
        lambda d: replace(d, response=d.response[: d.response.n_tokens - 1]),
        {"altered"},
    ),
    (
        "ScoredTrajectory",
        "another version",
        lambda s: replace(s, trajectory=other_version(s.trajectory, s.trajectory.version_min + 1)),
        {"altered"},
    ),
    (
        "ScoredTrajectory",
        "another attempt",
        lambda s: replace(s, trajectory=replace(s.trajectory, attempt=s.trajectory.attempt + 1)),
        {"no_completed"},
    ),
    (
        "TrajectoryStarted",
        "another attempt",
        lambda s: replace(s, attempt=s.attempt + 1),
        {"not_started", "attempt_gap"},
    ),
    ("TrajectoryTokens", "another start", lambda t: replace(t, start=t.start + 1), {"delta_gap"}),
    ("TrajectoryTokens", "an attempt that is not there", lambda t: replace(t, attempt=t.attempt + 9), {"attempt_gap"}),
    ("TrajectoryMoved", "another attempt", lambda m: replace(m, attempt=m.attempt + 1), {"attempt_gap"}),
    ("TrajectoryMoved", "more tokens", lambda m: replace(m, n_tokens=m.n_tokens + 100), {"delta_gap"}),
    ("TrajectoryEnded", "another attempt", lambda e: replace(e, attempt=e.attempt + 1), {"attempt_gap"}),
    ("Prompt", "one member more", lambda p: replace(p, group_size=p.group_size + 1), {"lost"}),
    ("Prompt", "a version that it was not sampled by", lambda p: replace(p, min_version=99), {"wrong_version"}),
    ("TrainingStep", "another number", lambda s: replace(s, step=s.step + 7), {"step_missing"}),
    ("TrainingStep", "another version", lambda s: replace(s, version=s.version + 7), {"wrong_version"}),
    ("TrainerStarted", "another step", lambda t: replace(t, step=t.step + 7), {"step_missing"}),
    ("TrainerStarted", "another version", lambda t: replace(t, version=t.version + 7), {"wrong_version"}),
    ("Evaluation", "one answer less", lambda e: replace(e, resolved=e.resolved[1:]), {"altered"}),
    ("RunEnded", "another step", lambda e: replace(e, step=e.step + 1), {"step_missing"}),
    ("AdoptCommand", "another rollout", lambda a: replace(a, rollout_id="rollout-9"), {"no_move"}),
    ("DeadLetter", "another member", lambda d: replace(d, trajectory_ids=("d/0/99/0",)), {"not_admitted"}),
    ("DeadLetterSettled", "another letter", lambda d: replace(d, letter_offset=77), {"no_letter"}),
    ("VersionManifest", "a step that was never made", lambda m: replace(m, step=99), {"step_missing"}),
]


@pytest.mark.parametrize(("name", "what", "mutate", "expected"), ALTERED, ids=[f"{n}: {w}" for n, w, _, _ in ALTERED])
def test_b15_any_record_that_says_something_else_is_noticed(
    run: Recording, name: str, what: str, mutate: Mutation, expected: set[str]
) -> None:
    del what
    wrong, n = [], 0
    for at, record in enumerate(run.records):
        event = run.decoded(record)
        if type(event).__name__ != name or not _can_be_altered(run, event):
            continue
        n += 1
        changed = [*run.records]
        changed[at] = run.changed(record, mutate(event))
        found = kinds(run.ledger(changed))
        if not found & expected:
            wrong.append(f"{record.where}: {found}")
    assert n > 0
    assert wrong == []


def _can_be_altered(run: Recording, event: r.Record) -> bool:
    """Leaves out what is void, ignored or overtaken: a change of it changes nothing."""
    if isinstance(event, r.TrajectoryTokens):
        return event.attempt == newest_attempts()[event.trajectory_id]
    if isinstance(event, r.CompletedTrajectory):
        return event.response.n_tokens > 1
    if isinstance(event, r.ScoredTrajectory):
        return event.trajectory.response.n_tokens > 1
    return True


def steps_of(run: Recording) -> list[tuple[int, r.TrainingStep]]:
    """Those that count."""
    found = [(at, e) for at, e in enumerate(map(run.decoded, run.records)) if isinstance(e, r.TrainingStep)]
    newest = {step.step: (at, step) for at, step in found}
    return [newest[number] for number in sorted(newest)]


def test_b1_a_member_that_two_steps_trained_is_named_with_both_steps(run: Recording) -> None:
    (_, first), *_, (at, last) = steps_of(run)
    changed = [*run.records]
    changed[at] = run.changed(run.records[at], replace(last, trained=(*last.trained, first.trained[0])))
    (violation,) = run.ledger(changed).violations
    assert (violation.kind, violation.trajectory_id) == ("trained_twice", first.trained[0])
    assert violation.places[0] == run.records[at].where
    assert len(violation.places) == 2


def test_b15_a_member_that_a_step_forgot_is_lost(run: Recording) -> None:
    at, step = next((at, step) for at, step in steps_of(run) if step.trained)
    changed = [*run.records]
    changed[at] = run.changed(run.records[at], replace(step, trained=step.trained[1:]))
    (violation,) = run.ledger(changed).violations
    assert (violation.kind, violation.trajectory_id) == ("lost", step.trained[0])
    assert violation.place.startswith("trajectories.scored[")


def test_an_evaluation_answer_that_is_trained_on_is_a_violation(run: Recording) -> None:
    at, step = steps_of(run)[-1]
    exam = next(e.resolved[0].trajectory_id for e in map(run.decoded, run.records) if isinstance(e, r.Evaluation))
    changed = [*run.records]
    changed[at] = run.changed(run.records[at], replace(step, trained=(*step.trained, exam)))
    assert {(v.kind, v.trajectory_id) for v in run.ledger(changed).violations} == {("conflict", exam)}


def test_offsets_of_the_trainer_that_go_back_are_a_violation(run: Recording) -> None:
    at, step = steps_of(run)[-1]
    name = next(name for name, offset in step.offsets.items() if name.startswith("trajectories.scored") and offset > 3)
    changed = [*run.records]
    changed[at] = run.changed(run.records[at], replace(step, offsets={**step.offsets, name: 0}))
    assert kinds(run.ledger(changed)) == {"offsets_back"}


def test_trained_more_versions_late_than_the_run_allows_is_a_violation(run: Recording) -> None:
    log = run.log(run.records)
    assert audit(log, run.world.codec, "run", max_staleness=2).balanced
    ledger = audit(log, run.world.codec, "run", max_staleness=1)
    assert kinds(ledger) == {"stale"}
    assert len(ledger.violations) == ledger.staleness[2]


def test_bytes_that_are_no_record_any_more_are_a_loss(run: Recording) -> None:
    for topic in ("prompts", "trajectories.completed", "trajectories.scored"):
        at = next(at for at, record in enumerate(run.records) if record.topic == topic)
        changed = [*run.records]
        changed[at] = replace(run.records[at], value=(run.records[at].value or b"")[:-1])
        ledger = run.ledger(changed)
        assert ledger.undecodable == 1
        assert f"lost {run.records[at].where}" in {f"{v.kind} {v.place}" for v in ledger.violations}


def test_the_audit_of_a_log_says_the_same_as_the_fold(run: Recording) -> None:
    missing = next(at for at, one in enumerate(run.records) if name_of(run, one) == "ScoredTrajectory")
    for records in (run.records, run.records[:missing] + run.records[missing + 1 :]):
        assert audit(run.log(records), run.world.codec, "run") == run.ledger(records)
