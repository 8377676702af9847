"""Taking groups: as many as fit, in order, with Started and the offset in one transaction."""

from __future__ import annotations

import pytest

from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always, by_trajectory
from laminar.operators.rollout.round import admits
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, Fenced, Unavailable
from laminar.streams.log import OutRecord, TopicPartition
from tests.support.dataflow import make_prompt
from tests.unit.operators.rollout.stage import FailingCommits, Stage, ten


def started(stage: Stage) -> list[str]:
    return [one.trajectory_id for one in stage.read("trajectories.partial", r.TrajectoryStarted)]


def committed(stage: Stage) -> int:
    return sum(stage.world.log.committed("run.rollout", "prompts").values())


def test_a_group_becomes_its_completed_members(stage: Stage) -> None:
    rollout = stage.rollout()
    [prompt] = stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    one = stage.completed()["d/0/0/2"]
    assert one.response.ids_T.tolist() == list(range(100, 110))
    assert one.text == " ".join(map(str, range(100, 110)))
    assert (one.member, one.finish, one.attempt, one.prompt) == (2, "stop", 0, prompt)
    assert (one.version_min, one.version_max) == (0, 0)
    assert one.timings.started_ms <= one.timings.first_token_ms < one.timings.ended_ms
    assert len({c.seed for c in stage.completed().values()}) == 4
    kinds = [type(e).__name__ for e in stage.partial("d/0/0/2")]
    assert kinds[0] == "TrajectoryStarted"
    assert kinds[-1] == "TrajectoryEnded"


def test_groups_are_taken_up_to_the_cap_and_offsets_pass_only_what_was_taken(stage: Stage) -> None:
    rollout = stage.rollout(max_in_flight=10, engine=ScriptedEngine(always(ten(hang_at=0)), max_running=16))
    stage.prompts(5)
    stage.run(0.5, rollout)
    assert len(started(stage)) == 8
    assert committed(stage) == 2


def test_what_is_polled_and_does_not_fit_is_taken_later_in_order(stage: Stage) -> None:
    partition = TopicPartition("prompts", 0)
    codec = stage.world.codec
    with stage.world.log.producer("p").transaction() as tx:
        for index in range(6):
            value = codec.encode(make_prompt(index))
            tx.send(OutRecord(topic="prompts", key=b"k", value=value, partition=partition.partition))
    rollout = stage.rollout(max_in_flight=4)
    stage.until(lambda: len(stage.completed()) == 24, rollout)
    events = stage.read("trajectories.partial", r.TrajectoryStarted)
    order = [one.prompt.prompt_id for one in sorted(events, key=lambda one: one.at_ms)]
    assert list(dict.fromkeys(order)) == [f"d/0/{i}" for i in range(6)]
    assert stage.world.log.committed("run.rollout", "prompts")[partition] == 6


def test_a_restarted_rollout_takes_the_groups_that_were_not_started_and_no_other(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(hang_at=0)), max_running=16)
    first = stage.rollout(max_in_flight=8, engine=engine)
    stage.prompts(5)
    stage.run(0.2, first)
    first.close()
    second = stage.rollout(max_in_flight=100, engine=ScriptedEngine(always(ten()), max_running=16))
    stage.run(0.5, second)
    assert sorted(started(stage)) == sorted(r.trajectory_id(f"d/0/{i}", m) for i in range(5) for m in range(4))


def test_a10_after_back_pressure_the_number_in_flight_is_back_at_its_cap_at_once(stage: Stage) -> None:
    rollout = stage.rollout(max_in_flight=32, engine=ScriptedEngine(always(ten(30)), max_running=32))
    stage.prompts(40)
    stage.run(0.1, rollout)
    assert len(started(stage)) == 32
    # The last token of all 32 comes with one poll; the step after it takes eight groups in one transaction.
    stage.until(lambda: len(stage.completed()) == 32, rollout)
    rollout.step(stage.world.now)
    assert len(started(stage)) == 64
    stage.run(0.01, rollout)
    assert len(stage.status().in_flight) == 32


def test_what_waits_in_the_engine_is_filled_up_once_half_of_it_is_free(stage: Stage) -> None:
    rollout = stage.rollout(max_in_flight=24, engine=ScriptedEngine(always(ten(30)), max_running=4))
    stage.prompts(40)
    stage.until(lambda: len(started(stage)) == 24, rollout)
    begun = []
    for n in (4, 8, 12):
        stage.until(lambda n=n: len(stage.completed()) >= n, rollout)  # type: ignore[misc]
        rollout.step(stage.world.now)
        begun.append(len(started(stage)))
    assert begun == [24, 24, 36]


@pytest.mark.parametrize(
    ("max_in_flight", "max_running", "group_size"),
    [(1, 1, 1), (1, 1, 16), (1, 8, 4), (4, 1, 4), (7, 3, 8), (None, 2, 16), (None, 64, 1), (3, 64, 64)],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_a13_every_valid_combination_starts_a_group(
    stage: Stage, max_in_flight: int | None, max_running: int, group_size: int, replicas: int
) -> None:
    rollouts = [
        stage.rollout(i, max_in_flight=max_in_flight, engine=ScriptedEngine(always(ten(3)), max_running=max_running))
        for i in range(replicas)
    ]
    stage.run(0.05, *rollouts)
    stage.prompts(8, group_size=group_size)
    stage.until(lambda: len(stage.completed()) == 8 * group_size, *rollouts, limit_s=60)


def test_a13_the_rule_admits_any_group_when_nothing_is_in_hand() -> None:
    assert admits(1000, in_flight=0, max_in_flight=1)
    assert not admits(2, in_flight=1, max_in_flight=2)


def test_a_group_waits_for_the_version_that_it_asks_for(stage: Stage) -> None:
    rollout = stage.rollout()
    stage.prompts(1, min_version=2)
    stage.run(0.3, rollout)
    assert started(stage) == []
    stage.publish(2)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert {one.version_min for one in stage.completed().values()} == {2}


def test_an_aborted_transaction_takes_nothing_and_the_next_step_takes_the_group_once(stage: Stage) -> None:
    faults = FailingCommits()
    rollout = stage.rollout(faults=faults)
    stage.run(0.05, rollout)
    stage.prompts(1)
    faults.next(Aborted, times=3)
    rollout.step(stage.world.now)
    assert (started(stage), committed(stage)) == ([], 0)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert len(started(stage)) == 4
    assert committed(stage) == 1


@pytest.mark.parametrize("error", [Fenced, Unavailable])
def test_an_unknown_outcome_or_a_successor_ends_the_process(stage: Stage, error: type[Exception]) -> None:
    faults = FailingCommits()
    rollout = stage.rollout(faults=faults)
    stage.run(0.05, rollout)
    stage.prompts(1)
    faults.next(error)
    with pytest.raises(error):
        stage.run(0.1, rollout)


def test_two_rollouts_share_the_groups_also_across_a_rebalance(stage: Stage) -> None:
    engines = [ScriptedEngine(always(ten()), max_running=8) for _ in range(3)]
    first = stage.rollout(0, engine=engines[0])
    stage.prompts(12)
    stage.run(0.05, first)
    second = stage.rollout(1, engine=engines[1])
    stage.run(0.4, first, second)
    first.drain(stage.world.now)
    first.close()
    third = stage.rollout(2, engine=engines[2])
    stage.prompts(12, first=12)
    stage.run(6.0, second, third)
    assert sorted(started(stage)) == sorted(r.trajectory_id(f"d/0/{i}", m) for i in range(24) for m in range(4))
    assert all(engine.submitted for engine in engines)


def test_a_paused_member_whose_partitions_went_to_another_takes_nothing_twice(stage: Stage) -> None:
    slow = ScriptedEngine(always(ten(hang_at=0)), max_running=4)
    sleeper = stage.rollout(0, engine=slow, max_in_flight=4)
    stage.prompts(8)
    stage.run(0.1, sleeper)  # takes one group, holds polled ones that do not fit
    other = stage.rollout(1, engine=ScriptedEngine(always(ten()), max_running=64))
    stage.run(40.0, other, tick_s=0.5)  # the sleeper's session passes
    assert len(started(stage)) == 32
    stage.run(1.0, sleeper, other)
    assert len(started(stage)) == len(set(started(stage))) == 32


def test_bytes_that_are_no_prompt_become_a_dead_letter_and_the_next_group_is_taken(stage: Stage) -> None:
    good = stage.world.codec.encode(make_prompt(0))
    wrong = stage.world.codec.encode(r.DrainCommand(rollout_id="x", incarnation=1, at_ms=0))
    with stage.world.log.producer("p").transaction() as tx:
        for value in (b"\xc3\x01nonsense", None, wrong, good):
            tx.send(OutRecord(topic="prompts", key=b"k", value=value, partition=3))
    rollout = stage.rollout()
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert [(one.topic, one.partition, one.offset) for one in stage.letters()] == [("prompts", 3, i) for i in range(3)]
    assert stage.world.log.committed("run.rollout", "prompts") == {TopicPartition("prompts", 3): 4}


def test_members_of_different_lengths_leave_and_new_groups_come_while_the_longest_runs(stage: Stage) -> None:
    answers = {"d/0/0/0": ten(400)}
    engine = ScriptedEngine(by_trajectory(answers, Answer(ids=(1, 2, 3))), max_running=8)
    rollout = stage.rollout(engine=engine)
    stage.prompts(6, sampling=r.Sampling(max_tokens=1000))
    stage.until(lambda: len(stage.completed()) == 23, rollout)
    assert "d/0/0/0" not in stage.completed()
    stage.until(lambda: "d/0/0/0" in stage.completed(), rollout)
