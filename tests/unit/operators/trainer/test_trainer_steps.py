"""The trainer operator over the memory log: steps, versions, staleness, dead letters, the end of the run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.operators.trainer.config import AlgorithmConfig, TrainerConfig
from laminar.pipeline.config.models import SupervisorConfig
from laminar.schemas import records as r
from laminar.schemas.errors import DeadlineExceeded, Fenced
from laminar.streams.log import OutRecord, TopicPartition
from tests.support.dataflow import make_prompt
from tests.support.training import TrainerRun, dead, eval_prompt, group, scored


@pytest.fixture
def run(tmp_path: Path) -> TrainerRun:
    return TrainerRun(tmp_path)


def test_a_start_announces_the_epoch_and_publishes_version_0(run: TrainerRun) -> None:
    run.start()
    run.settle()
    (started,) = run.world.read("training.steps", r.TrainerStarted)
    assert (started.epoch, started.step, started.version) == (0, 0, 0)
    states = [(m.version, m.parent, m.state) for m in run.world.read("weights.versions", r.VersionManifest)]
    assert states == [(0, -1, "prepared"), (0, -1, "committed")]


def test_a_step_takes_the_oldest_complete_groups(run: TrainerRun) -> None:
    run.start()
    run.world.write(*group(0)[:3])  # incomplete: never holds up the others
    for index in (1, 2, 3):
        run.feed([index])
    (step,) = run.steps
    assert {r.group_id_of(t) for t in step.trained} == {"d/0/1", "d/0/2"}
    run.world.write(group(0)[3])
    run.settle()
    assert {r.group_id_of(t) for t in run.steps[1].trained} == {"d/0/3", "d/0/0"}


def test_c11_a_version_counts_optimizer_steps(run: TrainerRun) -> None:
    run.start()
    run.feed(range(6))
    assert [(s.step, s.version) for s in run.steps] == [(1, 1), (2, 2), (3, 3)]
    assert run.committed == [0, 1, 2, 3]
    assert run.publisher.sealed == {0: 0, 1: 8, 2: 16, 3: 24}


def test_b11_the_same_batch_delivered_twice_makes_one_step(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    run.feed([0, 1])
    assert len(run.steps) == 1
    run.feed([2, 3])
    assert len(run.steps) == 2
    assert run.steps[1].metrics["duplicates"] == 8


def test_b12_a_result_of_an_older_attempt_is_ignored_and_counted(run: TrainerRun) -> None:
    run.start()
    prompt = make_prompt(0)
    run.world.write(scored(prompt, 0, attempt=1, n=7), scored(prompt, 0, attempt=0, n=2))
    run.world.write(*[scored(prompt, m) for m in (1, 2, 3)])
    run.feed([1])
    (step,) = run.steps
    assert step.metrics["late"] == 1
    assert step.n_tokens == 7 + 7 * 3


def test_c2_a_stale_member_is_dropped_and_its_group_is_consumed(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, max_staleness=1)
    run.start()
    run.feed([0, 1, 2, 3])
    fresh, old = make_prompt(4), make_prompt(5)
    run.world.write(*[scored(fresh, m, version=2 if m else 0) for m in range(4)])
    run.world.write(*[scored(old, m, version=0) for m in range(4)])
    run.settle()
    step = run.steps[2]
    assert {d.trajectory_id for d in step.dropped if d.reason == "stale"} == {
        "d/0/4/0", "d/0/5/0", "d/0/5/1", "d/0/5/2", "d/0/5/3",
    }  # fmt: skip
    assert step.staleness == {"0": 3}
    assert set(step.trained) == {"d/0/4/1", "d/0/4/2", "d/0/4/3"}


def test_f1_a_dead_member_is_out_of_the_group_and_the_group_closes(run: TrainerRun) -> None:
    run.start()
    run.world.write(*group(0)[:3], dead("d/0/0/3"))
    run.feed([1])
    (step,) = run.steps
    assert {t for t in step.trained if t.startswith("d/0/0/")} == {"d/0/0/0", "d/0/0/1", "d/0/0/2"}
    advantages = {s.trajectory.trajectory_id: s.advantage for s in run.learner.batches[0].samples}
    assert advantages["d/0/0/0"] == pytest.approx(1 - 2 / 3)
    assert "d/0/0/3" not in {d.trajectory_id for d in step.dropped}


def test_a_group_whose_members_all_died_is_lost_and_does_not_count_as_consumed(run: TrainerRun) -> None:
    run.start()
    run.world.write(dead(*[f"d/0/0/{m}" for m in range(4)]))
    run.feed([1])
    assert run.steps == []
    run.feed([2])
    assert len(run.steps) == 1


def test_zero_advantage_groups_are_consumed_without_training(run: TrainerRun) -> None:
    run.start()
    for index in (0, 1):
        prompt = make_prompt(index)
        run.world.write(*[scored(prompt, m, 1.0) for m in range(4)])
    run.settle()
    (step,) = run.steps
    assert step.trained == ()
    assert {d.reason for d in step.dropped} == {"zero_advantage"}
    assert len(step.dropped) == 8
    assert run.committed == [0, 1]


def test_f4_an_unscored_member_enters_no_mean_and_a_high_rate_warns(
    run: TrainerRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.start()
    prompt = make_prompt(0)
    failed = scored(prompt, 3)
    values = {f: getattr(failed, f) for f in failed.__dataclass_fields__}
    run.world.write(*[scored(prompt, m, float(m)) for m in range(3)])
    run.world.write(r.ScoredTrajectory(**{**values, "reward": None, "failure": "timeout"}))
    with caplog.at_level(logging.WARNING):
        run.feed([1])
    (step,) = run.steps
    assert r.Dropped(trajectory_id="d/0/0/3", reason="unscored") in step.dropped
    assert step.metrics["unscored_fraction"] == 1 / 8
    advantages = {s.trajectory.trajectory_id: s.advantage for s in run.learner.batches[0].samples}
    assert advantages["d/0/0/0"] == -1.0
    assert "unscored_fraction" in caplog.text


def test_s6_s19_undecodable_records_become_dead_letters_and_stop_nothing(run: TrainerRun) -> None:
    run.start()
    with run.world.log.producer("other").transaction() as tx:
        tx.send(OutRecord(topic="trajectories.scored", key=b"k", value=b"not framed", partition=2))
        tx.send(OutRecord(topic="trajectories.scored", key=b"k", value=None, partition=2))
        tx.send(OutRecord(topic="dead.letters", key=b"k", value=b"rubbish too"))
    run.feed([0, 1])
    letters = _letters(run)
    assert [(x.topic, x.partition, x.offset, x.value) for x in letters] == [
        ("trajectories.scored", 2, 0, b"not framed"),
        ("trajectories.scored", 2, 1, None),
    ]
    assert len(run.steps) == 1
    with run.world.log.producer("other").transaction() as tx:
        tx.send(OutRecord(topic="training.steps", key=b"k", value=b"rubbish too"))
    run.feed([2, 3])
    run.start()  # and its history can still be read
    run.feed([4, 5])
    assert run.learner.learnt[-1].startswith(("d/0/4/", "d/0/5/"))
    assert run.committed == [0, 1, 2, 3, 4]


def test_groups_of_several_partitions_are_taken_by_age(run: TrainerRun) -> None:
    run.start()
    for index in reversed(range(8)):
        run.world.write(*group(index))
        run.world.advance(1)
    run.settle()
    order = [sorted({r.group_id_of(t) for t in s.trained}) for s in run.steps]
    assert order == [["d/0/6", "d/0/7"], ["d/0/4", "d/0/5"], ["d/0/2", "d/0/3"], ["d/0/0", "d/0/1"]]


def test_display_offsets_stop_at_the_oldest_waiting_record(run: TrainerRun) -> None:
    run.start()
    waiting = group(0)[0]
    run.world.write(waiting)
    run.feed([1, 2])
    (step,) = run.steps
    committed = run.world.log.committed("run.trainer", "trajectories.scored")
    held = [p for p, offset in committed.items() if step.offsets[str(p)] == 0 and _end(run, p) > 0]
    assert len(held) == 1
    run.world.write(*group(0)[1:])
    run.feed([3])
    committed = run.world.log.committed("run.trainer", "trajectories.scored")
    assert committed == {p: _end(run, p) for p in committed}


def _end(run: TrainerRun, partition: TopicPartition) -> int:
    reader = run.world.log.reader()
    try:
        return reader.bounds(partition).end
    finally:
        reader.close()


def test_a11_a_relay_that_does_not_answer_is_a_warning_and_training_goes_on(
    run: TrainerRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.start()
    run.settle()
    run.publisher.fail = lambda: DeadlineExceeded("trainer publishes version 1: not within 15 s (relay-0)")
    with caplog.at_level(logging.WARNING):
        run.feed([0, 1, 2, 3])
    assert [s.step for s in run.steps] == [1, 2]
    assert run.steps[1].metrics["publish_failures"] >= 1
    assert "relay-0" in caplog.text
    assert run.committed == [0]
    run.publisher.fail = None
    run.world.advance(run.config.publish_retry_s)
    run.settle()
    assert run.committed == [0, 2]


def test_a_second_trainer_fences_the_first(run: TrainerRun) -> None:
    first = run.start()
    run.settle()
    run.world.write(*group(0), *group(1))
    run.start()
    run.settle()
    assert [s.epoch for s in run.world.read("training.steps", r.TrainerStarted)] == [0, 1]
    for _ in range(2):  # reads, and begins a step
        first.step(run.world.now)
    with pytest.raises(Fenced):
        first.step(run.world.now)
    assert len(run.steps) == 1


def test_a7_after_the_last_step_the_run_ends_once(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=2)
    run.start()
    run.feed(range(6))
    assert len(run.steps) == 2
    assert run.ended == ["all 2 steps are done"]
    assert run.committed == [0, 1, 2]


def test_a2_exhausted_data_makes_a_last_smaller_step_and_ends_the_run(run: TrainerRun) -> None:
    run.start()
    run.world.write(r.DataExhausted(run_id="run", groups=4, at_ms=0))
    run.world.write(dead(*[f"d/0/0/{m}" for m in range(4)]))
    run.feed([1, 2])
    assert run.ended == []
    run.feed([3])
    assert [len(s.trained) for s in run.steps] == [8, 4]
    assert run.ended == ["data exhausted at step 2"]


def test_a2_exhausted_exactly_at_the_boundary_ends_without_another_step(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    run.world.write(r.DataExhausted(run_id="run", groups=2, at_ms=0))
    run.settle()
    assert len(run.steps) == 1
    assert run.ended == ["data exhausted at step 1"]


def test_evaluation_round_0_is_written_without_stopping_training(run: TrainerRun) -> None:
    run.start()
    run.world.write(*[scored(eval_prompt(0, i, 4), 0, float(i == 0)) for i in range(3)])
    run.feed([0, 1])
    assert len(run.steps) == 1
    assert run.world.read("training.steps", r.Evaluation) == []
    run.world.write(dead("eval-d/0/3/0"))
    run.settle()
    (result,) = run.world.read("training.steps", r.Evaluation)
    assert (result.round, result.n, result.reward_mean) == (0, 3, pytest.approx(1 / 3))
    assert {d.trajectory_id for d in result.resolved} == {f"eval-d/0/{i}/0" for i in range(3)}
    assert {d.reason for d in result.resolved} == {"eval"}


def test_a_dead_letter_before_the_first_answer_still_counts_for_its_round(run: TrainerRun) -> None:
    run.start()
    run.world.write(dead("eval-d/0/1/0"))
    run.settle()
    run.world.write(scored(eval_prompt(0, 0, 2), 0, 1.0))
    run.settle()
    (result,) = run.world.read("training.steps", r.Evaluation)
    assert (result.n, result.reward_mean) == (1, 1.0)


def test_the_run_ends_with_the_last_evaluation(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=1)
    run.start()
    run.world.write(scored(eval_prompt(0, 0, 1), 0, 0.0))
    run.feed([0, 1])
    assert run.ended == []
    run.world.write(*[scored(eval_prompt(1, i, 2), 0, 1.0, version=1) for i in range(2)])
    run.settle()
    last = run.world.read("training.steps", r.Evaluation)[-1]
    assert (last.round, last.step, last.version, last.reward_mean) == (1, 1, 1, 1.0)
    assert run.ended == ["all 1 steps are done"]


def test_a_last_evaluation_that_does_not_come_ends_the_run_after_its_deadline(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=1, final_evaluation=True, final_evaluation_timeout_s=30)
    run.start()
    run.world.write(scored(eval_prompt(0, 0, 1), 0, 0.0))
    run.feed([0, 1])
    run.world.write(scored(eval_prompt(1, 0, 3), 0, 1.0, version=1))
    run.settle()
    run.world.advance(29)
    run.settle()
    assert run.ended == []
    run.world.write(scored(eval_prompt(1, 1, 3), 0, 1.0, version=1))
    run.settle()
    run.world.advance(29)
    run.settle()
    assert run.ended == []  # counted from the last answer
    run.world.advance(2)
    run.settle()
    assert run.ended == ["all 1 steps are done; last evaluation round: not within 30 s (round 1: 2 of 3 answers)"]
    result = run.world.read("training.steps", r.Evaluation)[-1]
    assert (result.round, result.n) == (1, 2)


def test_the_run_waits_for_a_first_evaluation_of_which_no_answer_has_come(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=1, final_evaluation=True)
    run.start()
    run.feed([0, 1])
    run.world.write(scored(eval_prompt(1, 0, 1), 0, 1.0, version=1))
    run.settle()
    assert run.ended == []  # its members are on their way from one owner to the next
    run.world.write(scored(eval_prompt(0, 0, 1), 0, 0.0))
    run.settle()
    assert run.ended == ["all 1 steps are done"]
    assert {e.round for e in run.world.read("training.steps", r.Evaluation)} == {0, 1}


def test_the_run_does_not_end_before_an_evaluation_that_has_begun(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=1, final_evaluation=False)
    run.start()
    run.world.write(scored(eval_prompt(0, 0, 2), 0, 0.0))
    run.feed([0, 1])
    assert run.ended == []
    run.world.write(scored(eval_prompt(0, 1, 2), 0, 1.0))
    run.settle()
    (result,) = run.world.read("training.steps", r.Evaluation)
    assert (result.round, result.n) == (0, 2)
    assert run.ended == ["all 1 steps are done"]


def test_by_default_a_last_evaluation_that_does_not_come_ends_the_run_before_the_supervisor_does() -> None:
    assert TrainerConfig().final_evaluation_timeout_s < SupervisorConfig().no_progress_timeout_s


def test_f7_a_mostly_truncated_batch_warns(run: TrainerRun, caplog: pytest.LogCaptureFixture) -> None:
    run.start()
    for index in (0, 1):
        for one in group(index):
            made = {f: getattr(one.trajectory, f) for f in one.trajectory.__dataclass_fields__}
            cut = r.CompletedTrajectory(**{**made, "finish": "length"})
            values = {f: getattr(one, f) for f in one.__dataclass_fields__}
            run.world.write(r.ScoredTrajectory(**{**values, "trajectory": cut}))
    with caplog.at_level(logging.WARNING):
        run.settle()
    assert run.steps[0].metrics["truncated_fraction"] == 1.0
    assert "truncated_fraction is 1.00" in caplog.text


def test_min_group_drops_a_group_with_too_few_members(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, algorithm=AlgorithmConfig(min_group=3))
    run.start()
    run.world.write(*group(0)[:2], dead("d/0/0/2", "d/0/0/3"))
    run.feed([1])
    (step,) = run.steps
    assert {(d.trajectory_id, d.reason) for d in step.dropped} == {("d/0/0/0", "min_group"), ("d/0/0/1", "min_group")}


def _letters(run: TrainerRun) -> list[r.DeadLetter]:
    reader = run.world.log.reader()
    reader.assign({TopicPartition("dead.letters", 0): 0})
    values = [record.value or b"" for record in reader.poll(100, 0.0)]
    reader.close()
    return [x for v in values if v.startswith(b"\xc3\x01") and isinstance(x := run.world.codec.decode(v), r.DeadLetter)]


def test_e4_truncated_sampling_is_warned_of_once(run: TrainerRun, caplog: pytest.LogCaptureFixture) -> None:
    run.start()
    with caplog.at_level(logging.WARNING):
        run.feed([0, 1])
        assert "top_p" not in caplog.text
        for index in (2, 3):
            for one in group(index):
                prompt = one.trajectory.prompt
                cut = replace(prompt, sampling=replace(prompt.sampling, top_p=0.9))
                run.world.write(replace(one, trajectory=replace(one.trajectory, prompt=cut)))
        run.settle()
    assert caplog.text.count("sampled with top_p 0.9, top_k 0, min_p 0") == 1
