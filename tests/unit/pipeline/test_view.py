from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from laminar.pipeline.live import curve, one_line, picture
from laminar.pipeline.view import InstanceView, LagView, RunFold, Staleness, View
from laminar.schemas import records as r


def step(
    number: int, *, epoch: int = 0, at_s: float = 0.0, reward: float = 0.5, version: int | None = None
) -> r.TrainingStep:
    return r.TrainingStep(
        run_id="run",
        epoch=epoch,
        step=number,
        version=number if version is None else version,
        trained=(f"d/0/{number}/0", f"d/0/{number}/1"),
        dropped=(r.Dropped(trajectory_id=f"d/0/{number}/2", reason="zero_advantage"),),
        staleness={"0": 1, "2": 1},
        metrics={"reward_mean": reward},
        offsets={},
        n_tokens=20,
        duration_ms=1.0,
        at_ms=int(at_s * 1000),
    )


def started(epoch: int, at_step: int, version: int, at_s: float = 0.0) -> r.TrainerStarted:
    return r.TrainerStarted(run_id="run", epoch=epoch, step=at_step, version=version, at_ms=int(at_s * 1000))


def evaluation(number: int, mean: float) -> r.Evaluation:
    return r.Evaluation(
        run_id="run", epoch=0, step=0, round=number, version=0, reward_mean=mean, n=4,
        resolved=(r.Dropped(trajectory_id=f"e/{number}/0/0", reason="eval"),), at_ms=0,
    )  # fmt: skip


def status(rollout: str, incarnation: int, at_s: float, tokens_per_s: float = 100.0) -> r.RolloutStatus:
    return r.RolloutStatus(
        rollout_id=rollout, incarnation=incarnation, state="sampling", version=3, kv_used=10, kv_total=100, running=4,
        waiting=1, preempted=0, max_running=8, tokens_per_s=tokens_per_s, in_flight=(), at_ms=int(at_s * 1000),
    )  # fmt: skip


def folded(*records: object) -> RunFold:
    fold = RunFold("run", steps=10)
    for record in records:
        fold.apply(record)
    return fold


def test_steps_that_a_new_trainer_voids_are_taken_back() -> None:
    fold = folded(started(0, 0, 0), step(1), step(2), step(3), started(1, 1, 4))
    assert fold.step == 1
    assert fold.trained() == 2
    fold.apply(step(2, epoch=0))
    assert fold.step == 1
    fold.apply(step(2, epoch=1, version=5))
    assert fold.view(0.0, started_at=0.0).version == 5
    assert fold.trained() == 4


def test_a_rollout_says_what_it_does_and_whether_its_engine_was_lost() -> None:
    beat = folded(status("rollout-0", 1, 5.0)).heartbeat("rollout-0")
    assert beat is not None
    assert beat.words == "v3, 4 running, KV 10 %"
    assert replace(beat, status=replace(beat.status, engine_losses=2)).words == "v3, KV 10 %, engine lost 2x"


def test_accuracy_is_of_the_first_and_the_newest_round() -> None:
    fold = folded(evaluation(0, 0.25))
    assert (fold.accuracy_before, fold.accuracy_after) == (0.25, None)
    fold.apply(evaluation(10, 0.7))
    fold.apply(evaluation(20, 0.8))
    assert (fold.accuracy_before, fold.accuracy_after) == (0.25, 0.8)
    assert fold.dropped() == {"eval": 3}


def test_time_left_follows_the_pace_of_the_newest_steps() -> None:
    fold = folded(started(0, 0, 0, at_s=100.0))
    assert fold.left_s(100.0) is None
    fold.apply(step(1, at_s=102.0))
    fold.apply(step(2, at_s=104.0))
    assert fold.left_s(104.0) == pytest.approx(16.0)
    assert fold.left_s(105.0) == pytest.approx(15.0)


def test_no_time_left_is_named_while_steps_are_missing_and_the_pace_is_too_old() -> None:
    fold = folded(started(0, 0, 0, at_s=100.0), step(1, at_s=102.0))
    assert fold.left_s(121.0) is None
    done = folded(started(0, 8, 0, at_s=100.0), step(10, at_s=102.0))
    assert done.left_s(121.0) == 0.0


def test_only_rollouts_that_live_count_for_tokens_per_second() -> None:
    fold = folded(
        status("rollout-0", 1, at_s=100.0), status("rollout-1", 1, at_s=50.0), status("rollout-0", 0, at_s=101.0)
    )
    view = fold.view(101.0, started_at=0.0)
    assert view.tokens_per_s == 100.0
    assert view.running == 5
    last = fold.last_heartbeat
    assert last is not None
    assert (last.status.rollout_id, last.status.incarnation) == ("rollout-0", 0)  # by the log's order, not by clocks


def test_staleness_is_measured_over_trained_trajectories() -> None:
    assert Staleness.of({}) == Staleness(mean=0.0, p99=0, max=0)
    assert Staleness.of({0: 99, 1: 900, 9: 1}) == Staleness(mean=pytest.approx(0.909), p99=1, max=9)


def test_another_runs_records_change_nothing() -> None:
    fold = folded(replace(step(5), run_id="other"), replace(evaluation(0, 0.1), run_id="other"))
    assert fold.step == 0
    assert fold.accuracy_before is None


def a_view() -> View:
    fold = folded(started(0, 0, 0), *(step(n, at_s=2.0 * n, reward=n / 10) for n in range(1, 6)), evaluation(0, 0.25))
    fold.apply(status("rollout-0", 1, at_s=10.0))
    return fold.view(
        11.0,
        started_at=0.0,
        instances=[
            InstanceView(instance="rollout-0", state="sampling", detail="v3, 4 running"),
            InstanceView(instance="trainer-0", state="restarting", detail="was killed by SIGKILL", restarts=2),
        ],
        lags=[LagView(topic="prompts", group="run.rollout", records=17)],
    )


def text_of(view: View) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(picture(view))
    return capture.get()


def test_f11_the_picture_and_the_log_line_show_the_same_numbers() -> None:
    view = a_view()
    shown, line = text_of(view), one_line(view)
    for number in ("5", "0.50", "17", "100"):
        assert number in shown
        assert number in line
    assert "step 5/10" in line
    assert "trainer-0 restarting" in line
    for text in ("trainer-0", "restarting", "was killed by SIGKILL", "rollout-0", "v3, 4 running", "0.25"):
        assert text in shown


def test_a_run_that_has_just_begun_can_be_shown() -> None:
    view = RunFold("run", steps=10).view(0.0, started_at=0.0)
    assert "step 0/10" in one_line(view)
    assert "of 10" in text_of(view)


def test_a_long_curve_is_averaged_into_its_width() -> None:
    assert curve(()) == ""
    assert curve((1.0, 1.0)) == "▁▁"
    long = curve(tuple(float(n) for n in range(1000)), width=20)
    assert len(long) == 20
    assert long[0] == "▁"
    assert long[-1] == "█"
