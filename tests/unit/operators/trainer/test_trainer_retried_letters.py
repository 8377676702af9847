"""Members that come back from dead letters: while their group is open, after it was consumed, after it was lost."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from laminar.operators.trainer.batch import (
    Arrival,
    Assembly,
    Death,
    Event,
    Retry,
    fold,
    lowest_offsets,
    take,
    take_returned,
)
from laminar.operators.trainer.progress import Progress
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.deadline import Deadline
from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.reading import decoded, read_topic
from tests.support.dataflow import make_prompt
from tests.support.training import TrainerRun, dead, eval_prompt, group, scored

SCORED, LETTERS = TopicPartition("trajectories.scored", 0), TopicPartition("dead.letters", 0)
CODEC = Codec()


def came(member: int, offset: int = 0, *, attempt: int = 0, prompt: r.Prompt | None = None) -> Arrival:
    record = scored(prompt or make_prompt(0), member, attempt=attempt)
    return Arrival(scored=record, source=SCORED, offset=offset, value=CODEC.encode(record))


def died(member: int | None, letter: int, group_id: str = "d/0/0") -> Death:
    unnamed = member is None
    name = f"{group_id}/?0@{letter}" if unnamed else f"{group_id}/{member}"
    return Death(group_id=group_id, trajectory_ids=(name,), source=LETTERS, offset=letter, unnamed=unnamed)


def again(letter: int, *members: int, group_id: str = "d/0/0") -> Retry:
    return Retry(source=LETTERS, offset=letter, trajectory_ids=tuple(f"{group_id}/{m}" for m in members))


def state_after(*events: Event, state: Assembly | None = None) -> Assembly:
    state = state or Assembly()
    for event in events:
        state = fold(state, event, group_size=4)
        packed = Progress(assembly=state).pack()
        assert Progress.unpack(packed, CODEC, "here").assembly == state  # a checkpoint may be taken at any time
    return state


def test_a_retried_member_of_a_ready_group_is_waited_for_and_counts() -> None:
    state = state_after(came(0), came(1), came(2), died(3, 0))
    assert state.ready == ("d/0/0",)
    state = state_after(again(0, 3), state=state)
    assert state.ready == ()
    state = state_after(came(3, attempt=2), state=state)
    (ready,), state = take(state, 1)
    assert len(ready.scored) == 4
    assert state.buried == frozenset()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_members_die_and_come_back_in_any_order_of_members(order: tuple[int, ...]) -> None:
    state = state_after(came(3), *(died(m, letter) for letter, m in enumerate(order)))
    assert state.ready == ("d/0/0",)
    state = state_after(*(again(letter, m) for letter, m in enumerate(order)), state=state)
    state = state_after(*(came(m) for m in order), state=state)
    assert len(take(state, 1)[0][0].scored) == 4


def test_a_group_that_died_whole_opens_again() -> None:
    state = state_after(*(died(m, m) for m in range(4)))
    assert (set(state.lost), state.groups, len(state.done)) == ({"d/0/0"}, {}, 0)
    state = state_after(again(2, 2), state=state)
    assert (set(state.groups), state.lost) == ({"d/0/0"}, {})
    state = state_after(came(2), state=state)
    (ready,), _ = take(state, 1)
    assert [a.scored.trajectory.member for a in ready.scored] == [2]


def test_all_letters_of_a_group_may_be_retried_and_it_is_whole_again() -> None:
    state = state_after(*(died(m, m) for m in range(4)), *(again(m, m) for m in range(4)))
    assert (state.groups, state.lost) == ({}, {})
    state = state_after(*(came(m) for m in range(4)), state=state)
    assert len(take(state, 1)[0][0].scored) == 4


def test_what_comes_back_for_a_consumed_group_is_returned_once() -> None:
    state = state_after(came(0), came(1), came(2), died(3, 7))
    _, state = take(state, 1)
    assert state.buried == {"0@7"}
    assert state_after(came(3, attempt=1), state=state).returned == ()  # nobody gave it back: a late one
    state = state_after(again(7, 3), came(3, 50, attempt=1), came(3, 51, attempt=1), came(0, 52), state=state)
    assert [a.scored.trajectory.trajectory_id for a in state.returned] == ["d/0/0/3"]
    assert state.duplicates == 2
    assert lowest_offsets(state, {SCORED: 60}) == {SCORED: 50}
    returned, state = take_returned(state)
    assert len(returned) == 1
    assert lowest_offsets(state, {SCORED: 60}) == {SCORED: 60}


def test_a_returned_member_that_dies_again_is_owed_only_after_another_retry() -> None:
    _, state = take(state_after(came(0), came(1), came(2), died(3, 7)), 1)
    state = state_after(again(7, 3), died(3, 9), came(3, attempt=1), state=state)
    assert state.returned == ()
    state = state_after(again(9, 3), came(3, attempt=2), state=state)
    assert len(state.returned) == 1


def test_a_letter_of_a_trained_member_gives_nothing_back() -> None:
    _, state = take(state_after(*(came(m) for m in range(4))), 1)
    state = state_after(died(3, 5), again(5, 3), came(3, attempt=1), state=state)
    assert (state.returned, state.duplicates) == ((), 1)


def test_a_letter_without_a_name_closes_a_group_of_which_something_came() -> None:
    state = state_after(*(died(None, letter) for letter in range(9)))
    assert state.ready == ()
    assert state.lost == {}
    state = state_after(came(0), came(1), came(2), died(None, 0))
    (closed,), state = take(state, 1)
    assert len(closed.scored) == 3
    state = state_after(came(3), came(3, 9), came(1), state=state)
    assert [a.scored.trajectory.member for a in state.returned] == [3]  # the letter was of nobody: it has its fate


def test_a_retried_letter_without_a_name_is_waited_for() -> None:
    state = state_after(came(0), came(1), came(2), died(None, 4), again(4))
    assert state.ready == ()
    assert len(take(state_after(came(3), state=state), 1)[0][0].scored) == 4


def test_evaluation_answers_come_back_while_the_round_is_open() -> None:
    first, second = (eval_prompt(0, i, 2) for i in range(2))
    lost = died(0, 3, group_id=second.prompt_id)
    state = state_after(came(0, prompt=first), lost)
    assert state.rounds[0].complete
    state = state_after(again(3, 0, group_id=second.prompt_id), state=state)
    assert not state.rounds[0].complete
    assert state_after(came(0, prompt=second), state=state).rounds[0].complete


# -- with the operator


def settled(letter: int, *members: str) -> r.DeadLetterSettled:
    return r.DeadLetterSettled(
        letter_partition=0, letter_offset=letter, action="retry", key=None, trajectory_ids=members, by="ada", at_ms=0
    )


def test_the_next_step_drops_what_came_back_too_late_and_a_resumed_trainer_does_the_same(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path)
    run.start()
    run.settle()
    run.world.write(*group(0)[:3], dead("d/0/0/3"))
    run.feed([1])
    assert len(run.steps) == 1
    run.world.write(settled(0, "d/0/0/3"), group(0)[3])
    run.settle()
    run.start()
    run.feed([2, 3])
    assert [(d.trajectory_id, d.reason) for d in run.steps[1].dropped] == [("d/0/0/3", "group_closed")]
    run.feed([4, 5])
    assert not any(d.reason == "group_closed" for d in run.steps[2].dropped)


def test_a_decision_and_its_result_in_one_transaction_are_taken_in_this_order(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path)
    run.start()
    run.settle()
    run.world.write(*group(0)[:3], dead("d/0/0/3"))
    run.settle()
    run.world.write(group(0)[3], settled(0, "d/0/0/3"))
    run.feed([1])
    assert "d/0/0/3" in run.learner.learnt


def test_a14_damage_on_the_trainers_topics_is_a_letter_or_passed_over(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path)
    run.start()
    run.settle()
    producer = run.world.log.producer("outside")
    with producer.transaction() as tx:
        for topic in ("trajectories.scored", "dead.letters", "training.steps"):
            for value in (None, b"", b"x", CODEC.encode(make_prompt(0))):
                tx.send(OutRecord(topic=topic, key=b"\xff", value=value))
        tx.send(OutRecord(topic="training.steps", key=b"run", value=CODEC.encode(dead("d/0/0/0", "d/0/1/0"))))
    run.feed([0, 1])

    def there(topic: str) -> list[r.Record]:
        return [x for _, x in decoded(read_topic(run.world.log, topic, Deadline.after(5, "read")), CODEC)]

    (step,) = [x for x in there("training.steps") if isinstance(x, r.TrainingStep)]
    assert len(step.trained) + len(step.dropped) == 8
    letters = [x for x in there("dead.letters") if isinstance(x, r.DeadLetter)]
    assert [letter.topic for letter in letters] == ["trajectories.scored"] * 4
    assert {letter.operator for letter in letters} == {"trainer"}
