from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import EMPTY, Tokens
from laminar.streams.audit import audit
from laminar.streams.ledger import Ledger
from laminar.streams.log import Membership, OutRecord, TopicPartition
from laminar.streams.memory import MemoryLog
from laminar.streams.topics import TOPICS, outgoing, topic_specs
from tests.support import sample

CODEC = Codec()


class Story:
    """Writes the topics of a run by hand; one partition each, so offsets count from 0 per topic."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.log.create_topics(topic_specs(dict.fromkeys(TOPICS, 1)))
        self.producer = self.log.producer("story")
        self.of = sample.prompt(0, group_size=2)
        self.ids = [r.trajectory_id(self.of.prompt_id, member) for member in (0, 1)]

    def write(self, *records: r.Record) -> None:
        with self.producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(CODEC, record))

    def raw(self, topic: str, key: bytes, value: bytes) -> None:
        with self.producer.transaction() as tx:
            tx.send(OutRecord(topic=topic, key=key, value=value))

    def commit(self, name: str, topic: str, offset: int) -> None:
        with self.producer.transaction() as tx:
            tx.commit_offsets(Membership(f"run.{name}"), {TopicPartition(topic, 0): offset})

    def admit(self) -> None:
        self.write(sample.trainer_started(), self.of)

    def start(self) -> None:
        self.write(*[sample.started(self.of, member) for member in (0, 1)])
        self.commit("rollout", "prompts", 1)

    def complete(self, member: int, **changes: Any) -> r.CompletedTrajectory:
        done = sample.completed(self.of, member, **changes)
        self.write(done, sample.ended(done.trajectory_id, attempt=done.attempt, n_tokens=done.response.n_tokens))
        return done

    def score(self, done: r.CompletedTrajectory, **changes: Any) -> None:
        self.write(sample.scored(done, **changes))

    def until_scored(self) -> None:
        self.admit()
        self.start()
        for member in (0, 1):
            self.score(self.complete(member))
        self.commit("reward", "trajectories.completed", 2)

    def step(self, step: int = 1, *, passed: int | None = None, **changes: Any) -> None:
        offsets: Mapping[str, int] = {} if passed is None else {"trajectories.scored[0]": passed}
        self.write(sample.training_step(step, offsets=offsets, **changes))

    def letter(self, *ids: str, topic: str = "trajectories.partial", offset: int = -1, **changes: Any) -> None:
        values: dict[str, Any] = {
            "operator": "rollout",
            "kind": "InvalidRequest",
            "error": "too long",
            "topic": topic,
            "partition": min(0, offset),
            "offset": offset,
            "attempt": 3,
            "key": self.of.prompt_id.encode(),
            "value": None,
            "group_id": self.of.prompt_id,
            "trajectory_ids": ids,
            "at_ms": 1,
        }
        self.write(r.DeadLetter(**{**values, **changes}))

    def audit(self, **options: Any) -> Ledger:
        return audit(self.log, CODEC, "run", **options)


@pytest.fixture
def story() -> Story:
    return Story()


def fates(ledger: Ledger) -> tuple[int, dict[str, int], int, dict[str, int]]:
    return ledger.trained, dict(ledger.dropped), ledger.dead, dict(ledger.in_flight)


def only(ledger: Ledger) -> str:
    """The one violation, as ``kind id place``."""
    assert not ledger.balanced
    (violation,) = ledger.violations
    return f"{violation.kind} {violation.trajectory_id} {violation.place}"


def test_an_empty_run_is_balanced(story: Story) -> None:
    ledger = story.audit()
    assert (ledger.admitted, fates(ledger), ledger.balanced) == (0, (0, {}, 0, {}), True)


def test_b15_every_stage_of_a_life_is_one_fate(story: Story) -> None:
    story.admit()
    assert fates(story.audit()) == (0, {}, 0, {"queued": 2})
    story.start()
    assert fates(story.audit()) == (0, {}, 0, {"sampling": 2})
    story.write(r.TrajectoryTokens(trajectory_id=story.ids[0], attempt=0, start=0, tokens=sample.tokens(), at_ms=1))
    first = story.complete(0)
    assert fates(story.audit()) == (0, {}, 0, {"completed": 1, "sampling": 1})
    story.score(first)
    story.commit("reward", "trajectories.completed", 1)
    assert fates(story.audit()) == (0, {}, 0, {"scored": 1, "sampling": 1})
    story.write(sample.ended(story.ids[1], finish=None, error="cannot be sampled"))
    story.letter(story.ids[1])
    assert fates(story.audit()) == (0, {}, 1, {"scored": 1})
    story.step(trained=[story.ids[0]], passed=1, staleness={"0": 1})
    ledger = story.audit()
    assert (ledger.admitted, fates(ledger), ledger.balanced) == (2, (1, {}, 1, {}), True)
    assert (ledger.steps, ledger.staleness, ledger.max_versions_per_trajectory) == (1, {0: 1}, 1)


def test_dropped_members_are_counted_by_reason_and_evaluations_too(story: Story) -> None:
    story.until_scored()
    exam = sample.prompt(5, group_size=1, purpose="eval", round_size=1)
    story.write(exam, sample.started(exam), sample.completed(exam), sample.ended("data/0/5/0"))
    story.write(sample.scored(sample.completed(exam)))
    story.step(
        trained=[story.ids[0]], dropped=[r.Dropped(trajectory_id=story.ids[1], reason="zero_advantage")], passed=3
    )
    assert fates(story.audit()) == (1, {"zero_advantage": 1}, 0, {"scored": 1})  # the exam waits for its round
    story.write(
        r.Evaluation(
            run_id="run",
            epoch=1,
            step=1,
            round=0,
            version=0,
            reward_mean=1.0,
            n=1,
            resolved=(r.Dropped(trajectory_id="data/0/5/0", reason="eval"),),
            at_ms=1,
        )
    )
    ledger = story.audit()
    assert (fates(ledger), ledger.balanced) == ((1, {"zero_advantage": 1, "eval": 1}, 0, {}), True)


def test_a_step_that_a_resumed_trainer_voids_does_not_count(story: Story) -> None:
    story.until_scored()
    story.step(1, trained=story.ids, passed=2)
    story.write(sample.trainer_started(epoch=2, step=0, version=2))
    ledger = story.audit()
    assert (fates(ledger), ledger.steps, ledger.void_steps) == ((0, {}, 0, {"scored": 2}), 0, 1)
    story.step(1, epoch=2, version=3, trained=story.ids, passed=2)
    ledger = story.audit()
    assert (fates(ledger), ledger.steps, ledger.void_steps, ledger.balanced) == ((2, {}, 0, {}), 1, 1, True)


def test_a_step_at_or_below_the_resumed_one_still_counts(story: Story) -> None:
    story.until_scored()
    story.step(1, trained=[story.ids[0]])
    story.step(2, trained=[story.ids[1]])
    story.write(sample.trainer_started(epoch=2, step=1, version=3))
    ledger = story.audit()
    assert (fates(ledger), ledger.steps, ledger.void_steps) == ((1, {}, 0, {"scored": 1}), 1, 1)


def test_steps_of_another_run_do_not_count(story: Story) -> None:
    story.until_scored()
    story.step(trained=story.ids, run_id="other")
    assert fates(story.audit()) == (0, {}, 0, {"scored": 2})


def test_b1_trained_twice_is_a_violation(story: Story) -> None:
    story.until_scored()
    story.step(1, trained=story.ids)
    story.step(2, trained=[story.ids[0]])
    assert only(story.audit()) == f"trained_twice {story.ids[0]} training.steps[0]@2"


def test_b15_trained_and_dropped_is_a_violation(story: Story) -> None:
    story.until_scored()
    story.step(1, trained=story.ids)
    story.step(2, dropped=[r.Dropped(trajectory_id=story.ids[1], reason="stale")])
    assert only(story.audit()) == f"conflict {story.ids[1]} training.steps[0]@2"


def test_b11_a_second_copy_that_the_trainer_ignored_is_no_second_fate(story: Story) -> None:
    story.until_scored()
    story.step(1, trained=story.ids)
    story.step(2, dropped=[r.Dropped(trajectory_id=story.ids[1], reason="duplicate")])
    assert story.audit().balanced


def test_b15_trained_and_dead_is_a_violation(story: Story) -> None:
    story.until_scored()
    story.step(trained=story.ids)
    story.letter(story.ids[0], topic="trajectories.completed", offset=0)
    assert only(story.audit()) == f"conflict {story.ids[0]} dead.letters[0]@0"


def test_b15_a_prompt_that_was_taken_and_never_started_is_lost(story: Story) -> None:
    story.admit()
    story.commit("rollout", "prompts", 1)
    ledger = story.audit()
    assert {(v.kind, v.trajectory_id, v.place) for v in ledger.violations} == {
        ("lost", i, "prompts[0]@0") for i in story.ids
    }
    assert fates(ledger) == (0, {}, 0, {"queued": 2})


def test_b15_a_prompt_that_could_not_be_taken_is_dead(story: Story) -> None:
    story.admit()
    story.commit("rollout", "prompts", 1)
    story.letter(*story.ids, topic="prompts", offset=0)
    ledger = story.audit()
    assert (fates(ledger), ledger.balanced) == ((0, {}, 2, {}), True)


def test_b15_an_end_without_its_completed_trajectory_is_lost(story: Story) -> None:
    story.admit()
    story.start()
    story.write(sample.ended(story.ids[1]))
    assert only(story.audit()) == f"lost {story.ids[1]} trajectories.partial[0]@2"


def test_b15_a_dead_end_without_its_letter_is_lost(story: Story) -> None:
    story.admit()
    story.start()
    story.write(sample.ended(story.ids[0], finish=None, error="three times"))
    assert only(story.audit()) == f"lost {story.ids[0]} trajectories.partial[0]@2"


def test_b15_a_completed_trajectory_that_reward_passed_without_a_score_is_lost(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.complete(1)
    story.commit("reward", "trajectories.completed", 1)
    assert only(story.audit()) == f"lost {story.ids[0]} trajectories.completed[0]@0"


def test_b15_a_scored_trajectory_that_the_trainer_passed_is_lost(story: Story) -> None:
    story.until_scored()
    story.step(trained=[story.ids[0]], passed=2)
    assert only(story.audit()) == f"lost {story.ids[1]} trajectories.scored[0]@1"


def test_b15_undecodable_bytes_that_were_passed_need_a_dead_letter(story: Story) -> None:
    story.admit()
    story.start()
    story.raw("trajectories.completed", b"data/0/0", b"rubbish")
    assert story.audit().balanced
    story.commit("reward", "trajectories.completed", 1)
    ledger = story.audit()
    assert only(ledger) == "lost data/0/0 trajectories.completed[0]@0"
    assert ledger.undecodable == 1
    story.letter(topic="trajectories.completed", offset=0, kind="DecodeError")
    assert story.audit().balanced


def test_b15_a_member_whose_result_is_unreadable_is_dead_by_the_letter_of_its_group(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.write(sample.ended(story.ids[1]))
    story.raw("trajectories.completed", b"data/0/0", b"rubbish")
    story.letter(topic="trajectories.completed", offset=1, kind="DecodeError", group_id=None)
    ledger = story.audit()
    assert (fates(ledger), ledger.balanced) == ((0, {}, 1, {"completed": 1}), True)


def test_trained_but_never_admitted_is_a_violation(story: Story) -> None:
    story.until_scored()
    ghost = sample.completed(sample.prompt(9))
    story.write(sample.started(sample.prompt(9)), ghost, sample.ended(ghost.trajectory_id), sample.scored(ghost))
    story.step(trained=[*story.ids, ghost.trajectory_id])
    ledger = story.audit()
    assert only(ledger) == "not_admitted data/0/9/0 training.steps[0]@1"
    assert (ledger.trained, ledger.admitted) == (2, 2)


def test_trained_without_a_result_is_a_violation(story: Story) -> None:
    story.admit()
    story.start()
    story.step(trained=[story.ids[0]])
    assert only(story.audit()) == f"no_result {story.ids[0]} training.steps[0]@1"


def two_versions(*versions: int, updates: r.UpdateMode) -> dict[str, Any]:
    """A response with two tokens of each."""
    return {
        "response": Tokens.concat([sample.tokens(2, version=version) for version in versions]),
        "version_min": min(versions),
        "version_max": max(versions),
        "updates": updates,
    }


def test_c8_two_versions_in_one_trajectory_are_a_violation_where_versions_are_pinned(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.complete(1, **two_versions(3, 4, updates="pinned"))
    ledger = story.audit()
    assert only(ledger) == f"two_versions {story.ids[1]} trajectories.completed[0]@1"
    assert ledger.max_versions_per_trajectory == 2
    assert ledger.mean_versions_per_trajectory == 1.5


@pytest.mark.parametrize(
    ("began", "ended"), [("in_flight", "in_flight"), ("pinned", "in_flight"), ("in_flight", "pinned")]
)
def test_two_versions_are_none_where_a_rollout_changed_its_weights_in_flight(
    story: Story, began: r.UpdateMode, ended: r.UpdateMode
) -> None:
    """Also when the setting was changed while it was being sampled."""
    story.admit()
    story.write(*(sample.started(story.of, member, updates=began) for member in range(story.of.group_size)))
    story.complete(0, updates=ended)
    story.complete(1, **two_versions(3, 4, updates=ended))
    ledger = story.audit()
    assert ledger.balanced
    assert (ledger.max_versions_per_trajectory, ledger.mean_versions_per_trajectory) == (2, 1.5)


def test_an_older_version_behind_a_newer_one_is_a_violation_in_flight(story: Story) -> None:
    story.admit()
    story.write(*(sample.started(story.of, member, updates="in_flight") for member in range(story.of.group_size)))
    story.complete(0, **two_versions(3, 5, 4, updates="in_flight"))
    story.complete(1, **two_versions(3, 4, 5, updates="in_flight"))
    ledger = story.audit()
    assert only(ledger) == f"version_back {story.ids[0]} trajectories.completed[0]@0"
    assert "token 4 was sampled by version 4, the one before it by 5" in ledger.violations[0].detail


def test_a_version_older_than_the_rollout_held_when_it_began_is_a_violation_in_flight(story: Story) -> None:
    story.admit()
    story.write(
        *(sample.started(story.of, member, updates="in_flight", version=4) for member in range(story.of.group_size))
    )
    story.complete(0, **two_versions(3, 4, updates="in_flight"))
    story.complete(1, **two_versions(4, 6, updates="in_flight"))
    assert only(story.audit()) == f"wrong_version {story.ids[0]} trajectories.completed[0]@0"


@pytest.mark.parametrize(
    ("topic", "kind"), [("trajectories.completed", "completed_twice"), ("trajectories.scored", "scored_twice")]
)
def test_b15_the_same_attempt_twice_on_a_topic_is_a_violation(story: Story, topic: str, kind: str) -> None:
    story.until_scored()
    again = sample.completed(story.of, 0)
    story.write(again if topic == "trajectories.completed" else sample.scored(again))
    assert only(story.audit()) == f"{kind} {story.ids[0]} {topic}[0]@2"


def test_admitted_twice_is_a_violation(story: Story) -> None:
    story.admit()
    story.write(story.of)
    ledger = story.audit()
    assert {v.kind for v in ledger.violations} == {"admitted_twice"}
    assert ledger.admitted == 2


def moved(story: Story, member: int, attempt: int) -> tuple[r.TrajectoryMoved, r.AdoptCommand]:
    """Repack's transaction: its owner is dead."""
    trajectory_id = story.ids[member]
    move = r.TrajectoryMoved(
        trajectory_id=trajectory_id,
        attempt=attempt,
        reason="dead",
        from_rollout="rollout-0",
        to_rollout="rollout-1",
        to_incarnation=1,
        n_tokens=0,
        at_ms=1,
    )
    snapshot = r.Snapshot(
        trajectory_id=trajectory_id,
        attempt=attempt,
        member=member,
        prompt=story.of,
        response=EMPTY,
        version=0,
        seed=0,
        timings=r.Timings(),
    )
    adopt = r.AdoptCommand(
        rollout_id="rollout-1",
        incarnation=1,
        reason="dead",
        from_rollout="rollout-0",
        snapshot=snapshot,
        at_ms=1,
    )
    return move, adopt


def test_b12_a_late_result_of_an_older_attempt_is_ignored_and_counted(story: Story) -> None:
    story.admit()
    story.start()
    story.write(*moved(story, 0, 1))
    late = story.complete(0)  # the old owner wakes up
    story.score(late)
    ledger = story.audit()
    assert (fates(ledger), ledger.late, ledger.balanced) == ((0, {}, 0, {"sampling": 2}), 1, True)
    newest = story.complete(0, attempt=1, rollout_id="rollout-1")
    story.score(newest)
    story.step(trained=[story.ids[0]])
    ledger = story.audit()
    assert (fates(ledger), ledger.late, ledger.balanced) == ((1, {}, 0, {"sampling": 1}), 1, True)


def test_b12_a_dead_letter_of_an_older_attempt_is_no_conflict(story: Story) -> None:
    story.admit()
    story.start()
    story.write(*moved(story, 0, 1), sample.ended(story.ids[0], finish=None, error="gone"))
    story.letter(story.ids[0])
    story.score(story.complete(0, attempt=1, rollout_id="rollout-1"))
    story.step(trained=[story.ids[0]])
    ledger = story.audit()
    assert (fates(ledger), ledger.late, ledger.balanced) == ((1, {}, 0, {"sampling": 1}), 1, True)


def test_b12_an_end_that_was_overtaken_by_a_move_counts_once(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.write(*moved(story, 0, 1))  # decided before the end was seen
    assert fates(story.audit()) == (0, {}, 0, {"completed": 1, "sampling": 1})
    story.complete(0, attempt=1, rollout_id="rollout-1")
    ledger = story.audit()
    assert (fates(ledger), ledger.late, ledger.balanced) == ((0, {}, 0, {"completed": 1, "sampling": 1}), 1, True)


def test_a_topic_whose_beginning_is_gone_proves_no_loss() -> None:
    story = Story()
    story.log.broker.specs["trajectories.partial"] = replace(
        story.log.broker.specs["trajectories.partial"], retention_ms=1
    )
    story.admit()
    story.start()
    story.log.maintain(now=4_000_000_000.0)
    ledger = story.audit()
    assert ledger.incomplete == ("trajectories.partial",)
    assert ledger.balanced


def test_the_groups_of_operators_with_other_names_can_be_given(story: Story) -> None:
    story.admit()
    story.commit("samplers", "prompts", 1)
    assert story.audit().balanced
    assert not story.audit(rollout_group="run.samplers").balanced


def test_a_ledger_is_json_with_the_keys_of_the_summary(story: Story) -> None:
    story.until_scored()
    story.step(trained=[story.ids[0]], passed=2)
    facts = json.loads(json.dumps(story.audit().as_json()))
    assert {k: facts[k] for k in ("trained", "dropped", "dead", "in_flight", "balanced")} == {
        "trained": 1,
        "dropped": {},
        "dead": 0,
        "in_flight": 1,
        "balanced": False,
    }
    assert facts["violations"] == [
        f"lost: {story.ids[1]} at trajectories.scored[0]@1: passed by the trainer, neither trained nor dropped"
    ]
