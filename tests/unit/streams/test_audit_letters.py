"""Dead letters in the ledger: given back, dropped, twice, about nothing; and offsets that were skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.streams.dead_letter import RETRY_OF
from laminar.streams.topics import outgoing
from tests.support import sample
from tests.unit.streams.test_audit import CODEC, Story, fates, only


@pytest.fixture
def story() -> Story:
    return Story()


def decide(story: Story, action: r.SettleAction, *ids: str, letter: int = 0, again: r.Record | None = None) -> None:
    """One transaction of a person: the decision and, with a retry, the record that stands again."""
    settled = r.DeadLetterSettled(
        letter_partition=0,
        letter_offset=letter,
        action=action,
        key=b"k",
        group_id=story.of.prompt_id,
        trajectory_ids=ids,
        by="ada@lab",
        at_ms=1,
    )
    with story.producer.transaction() as tx:
        tx.send(outgoing(CODEC, settled))
        if again is not None:
            header = (RETRY_OF, f"dead.letters[0]@{letter}".encode())
            tx.send(replace(outgoing(CODEC, again), headers=(header,)))


def unscored(story: Story) -> r.CompletedTrajectory:
    """Member 0 could not be scored: a letter of reward about the first completed record."""
    story.admit()
    story.start()
    done = story.complete(0)
    story.letter(story.ids[0], topic="trajectories.completed", offset=0, operator="reward")
    story.commit("reward", "trajectories.completed", 1)
    return done


def test_a_letter_that_is_given_back_is_no_fate_any_more(story: Story) -> None:
    done = unscored(story)
    assert fates(story.audit()) == (0, {}, 1, {"sampling": 1})
    decide(story, "retry", story.ids[0], again=done)
    ledger = story.audit()
    assert (fates(ledger), ledger.retried, ledger.violations) == ((0, {}, 0, {"completed": 1, "sampling": 1}), 1, ())
    story.score(done)
    story.commit("reward", "trajectories.completed", 2)
    story.step(trained=[story.ids[0]], passed=1)
    ledger = story.audit()
    assert (fates(ledger), ledger.violations) == ((1, {}, 0, {"sampling": 1}), ())


def test_a_record_that_stands_again_and_is_passed_without_a_result_is_lost(story: Story) -> None:
    decide_again = unscored(story)
    decide(story, "retry", story.ids[0], again=decide_again)
    story.commit("reward", "trajectories.completed", 2)
    assert only(story.audit()) == f"lost {story.ids[0]} trajectories.completed[0]@1"


def test_a_letter_that_is_given_back_may_be_written_again(story: Story) -> None:
    decide(story, "retry", story.ids[0], again=unscored(story))
    story.letter(story.ids[0], topic="trajectories.completed", offset=1, operator="reward")
    story.commit("reward", "trajectories.completed", 2)
    ledger = story.audit()
    assert (fates(ledger), ledger.violations) == ((0, {}, 1, {"sampling": 1}), ())


def test_a_letter_that_is_dropped_stays_a_fate(story: Story) -> None:
    unscored(story)
    decide(story, "drop", story.ids[0])
    ledger = story.audit()
    assert (fates(ledger), ledger.retried, ledger.violations) == ((0, {}, 1, {"sampling": 1}), 0, ())


def test_of_two_decisions_the_first_counts(story: Story) -> None:
    unscored(story)
    decide(story, "drop", story.ids[0])
    decide(story, "retry", story.ids[0])
    ledger = story.audit()
    assert (fates(ledger), ledger.violations) == ((0, {}, 1, {"sampling": 1}), ())


def test_a_letter_that_is_given_back_without_its_record_is_lost(story: Story) -> None:
    unscored(story)
    decide(story, "retry", story.ids[0])
    kinds = {f"{v.kind} {v.trajectory_id} {v.place}" for v in story.audit().violations}
    assert kinds == {f"lost {story.ids[0]} dead.letters[0]@1"}


def test_a_record_that_stands_again_though_nobody_gave_it_back_is_a_violation(story: Story) -> None:
    done = unscored(story)
    header = (RETRY_OF, b"dead.letters[0]@0")
    with story.producer.transaction() as tx:
        tx.send(replace(outgoing(CODEC, done), headers=(header,)))
    assert {v.kind for v in story.audit().violations} == {"no_letter", "completed_twice"}


def test_a_decision_about_no_letter_is_a_violation(story: Story) -> None:
    story.admit()
    decide(story, "drop", story.ids[0], letter=7)
    assert only(story.audit()) == f"no_letter {story.ids[0]} dead.letters[0]@0"


def test_a_record_that_its_consumer_buried_twice_is_a_violation(story: Story) -> None:
    unscored(story)
    story.letter(story.ids[0], topic="trajectories.completed", offset=0, operator="reward")
    (violation,) = story.audit().violations
    assert (violation.kind, violation.places) == ("letter_twice", ("dead.letters[0]@1", "dead.letters[0]@0"))


def test_a_member_that_was_given_up_begins_anew_with_the_next_attempt(story: Story) -> None:
    story.admit()
    story.start()
    story.write(sample.ended(story.ids[0], finish=None, error="three times"))
    story.letter(story.ids[0])
    again = sample.started(story.of, 0, attempt=1, incarnation=0)
    decide(story, "retry", story.ids[0], again=again)
    ledger = story.audit()
    assert (fates(ledger), ledger.violations) == ((0, {}, 0, {"sampling": 2}), ())


def test_a_letter_that_names_nobody_buries_the_member_whose_record_it_is_about(story: Story) -> None:
    """What only a full decode finds wrong: the audit can read whose it is, reward could not."""
    story.admit()
    story.start()
    story.complete(0)
    story.letter(topic="trajectories.completed", offset=0, operator="reward", kind="DecodeError")
    story.commit("reward", "trajectories.completed", 1)
    ledger = story.audit()
    assert (fates(ledger), ledger.violations) == ((0, {}, 1, {"sampling": 1}), ())


def skip(story: Story, group: str, topic: str, first: int, after: int) -> None:
    story.write(
        r.OffsetsSkipped(
            operator=group, group=f"run.{group}", topic=topic, partition=0, from_offset=first, to_offset=after, at_ms=1
        )
    )


def test_what_a_group_skipped_by_configuration_is_told_and_not_called_lost(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.complete(1)
    story.commit("reward", "trajectories.completed", 2)
    assert {v.kind for v in story.audit().violations} == {"lost"}
    skip(story, "reward", "trajectories.completed", 0, 2)
    ledger = story.audit()
    assert [str(one) for one in ledger.skipped] == ["trajectories.completed[0] 0..1 by run.reward"]
    assert (ledger.violations, fates(ledger)) == ((), (0, {}, 0, {"completed": 2}))
    assert ledger.as_json()["skipped"] == ["trajectories.completed[0] 0..1 by run.reward"]


def test_a_skip_excuses_only_its_own_offsets(story: Story) -> None:
    story.admit()
    story.start()
    story.complete(0)
    story.complete(1)
    story.commit("reward", "trajectories.completed", 2)
    skip(story, "reward", "trajectories.completed", 0, 1)
    assert only(story.audit()) == f"lost {story.ids[1]} trajectories.completed[0]@1"


def test_members_whose_beginning_is_gone_are_counted_apart() -> None:
    story = Story()
    story.log.broker.specs["prompts"] = replace(story.log.broker.specs["prompts"], retention_ms=1)
    story.admit()
    story.start()
    story.score(story.complete(0))
    story.log.maintain(now=4_000_000_000.0)
    ledger = story.audit()
    assert (ledger.incomplete, ledger.admitted, ledger.unknown, ledger.violations) == (("prompts",), 0, 2, ())
