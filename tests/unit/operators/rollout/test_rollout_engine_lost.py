"""What becomes of a rollout whose engine is lost at any of its calls, and of what it had in hand."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always, by_trajectory
from laminar.operators.rollout.engines.scripted_absence import Call
from laminar.operators.rollout.operator import Rollout
from laminar.operators.rollout.self_check import RESERVED
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from tests.support.lives import read_lives
from tests.unit.operators.rollout.stage import Stage, ten
from tests.unit.operators.rollout.test_checked_engine import manifest, right
from tests.unit.operators.rollout.test_rollout_beside import Beside

CALLS: tuple[Call, ...] = ("submit", "abort", "poll", "load", "stats", "decode")


def its_own(request: EngineRequest) -> Answer:
    """An answer of a length, tokens and logprobs that depend on the trajectory alone."""
    rng = random.Random(request.trajectory_id)
    n = rng.randint(6, 24)
    return Answer(ids=tuple(rng.choices(range(5, 200), k=n)), logprobs=tuple(-0.25 * (i + 1) for i in range(n)))


def lossy(script=its_own, *, away: float = 5, max_running: int = 8, **how) -> ScriptedEngine:  # type: ignore[no-untyped-def]
    return ScriptedEngine(script, away=away, max_running=max_running, **how)


def holds(stage: Stage, n: int, index: int = 0) -> bool:
    """Whether a rollout has said that it has so many in hand."""
    told = [s for s in stage.read("rollouts.status", r.RolloutStatus) if s.rollout_id == f"rollout-{index}"]
    return bool(told) and len(told[-1].in_flight) == n


def says(stage: Stage, state: str, index: int = 0) -> bool:
    """Whether this is what a rollout said last."""
    told = [s for s in stage.read("rollouts.status", r.RolloutStatus) if s.rollout_id == f"rollout-{index}"]
    return bool(told) and told[-1].state == state


def repack(stage: Stage) -> Repack:
    config = RepackConfig(period_s=0.3, dead_after_s=3.0, version_wait_s=2.0, release_timeout_s=1.0)
    return Repack(config, stage.world.context("repack"))


def lives(stage: Stage) -> dict[str, list[object]]:
    """Of each trajectory, in order; fails where a token is missing or stands there twice."""
    return read_lives(stage.read("trajectories.partial", object), stage.completed())


def moves(stage: Stage) -> list[r.TrajectoryMoved]:
    return stage.read("trajectories.partial", r.TrajectoryMoved)


def release(stage: Stage, source: Rollout, ids: Sequence[str], target: Rollout) -> None:
    stage.world.write(
        r.ReleaseCommand(
            rollout_id="rollout-0", incarnation=source.incarnation, trajectory_ids=tuple(ids), to_rollout="rollout-1",
            to_incarnation=target.incarnation, at_ms=stage.world.now_ms,
        )
    )  # fmt: skip


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a6_an_engine_lost_at_any_call_loses_no_token_and_repeats_none(
    stage: Stage, call: Call, skip: int, beside: bool
) -> None:
    engine = lossy()
    stage.prompts(6)
    background = Beside(most=3) if beside else None
    rollout = stage.rollout(engine=engine, background=background)
    other = stage.rollout(1, engine=lossy(), background=background)
    everybody = (rollout, other, repack(stage))
    if call == "load":
        engine.lose(at=call, skip=skip // 2)
    stage.until(lambda: says(stage, "sampling") or bool(engine.losses), *everybody)
    if call != "load":
        engine.lose(at=call, skip=skip)
    stage.run(0.03, *everybody)
    release(stage, rollout, [one.trajectory_id for one in stage.status().in_flight], other)
    stage.publish(1)
    stage.until(lambda: len(stage.completed()) == 24, *everybody)
    assert engine.losses == 1
    for name, made in stage.completed().items():
        answer = its_own(EngineRequest(trajectory_id=name, prompt_ids=(), sampling=r.Sampling(max_tokens=1), seed=0))
        assert (tuple(made.response.ids_T.tolist()), tuple(made.response.logprobs_T.tolist())) == (
            answer.ids,
            answer.logprobs,
        )
        assert made.version_min == made.version_max
    assert len(lives(stage)) == 24
    assert stage.letters() == []
    stage.until(lambda: stage.status().version == 1, *everybody)


def test_a6_what_came_out_of_a_lost_engine_goes_to_the_pool_in_order(stage: Stage) -> None:
    engine = lossy(always(ten()))
    stage.prompts(1)
    rollout = stage.rollout(engine=engine, delta_s=1000.0)
    stage.until(lambda: bool(engine.submitted), rollout)
    stage.run(0.035, rollout)
    assert stage.read("trajectories.partial", r.TrajectoryTokens) == []
    names = [one.trajectory_id for one in engine.submitted]
    engine.lose(at="poll")
    stage.run(0.03, rollout)
    assert sorted(one.trajectory_id for one in moves(stage)) == sorted(names)
    for name in names:
        started, tokens, moved = stage.partial(name)
        assert tokens.tokens.ids_T.tolist() == list(range(100, 100 + tokens.tokens.n_tokens))
        assert tokens.tokens.n_tokens > 1
        assert (started.attempt, tokens.attempt, moved.attempt) == (0, 0, 1)
        assert (moved.reason, moved.to_rollout, moved.to_incarnation) == ("lost", "rollout-0", 0)
        assert moved.n_tokens == tokens.tokens.n_tokens


def test_what_had_finished_when_the_engine_was_lost_stays_finished(stage: Stage) -> None:
    engine = lossy(by_trajectory({"d/0/0/1": ten(3), "d/0/0/2": ten(3)}, ten()))
    stage.prompts(1)
    rollout = stage.rollout(engine=engine, finish_s=1000.0)
    engine.lose(at="decode", skip=1)
    stage.run(0.5, rollout)
    assert engine.losses == 1
    assert sorted(stage.completed()) == ["d/0/0/1", "d/0/0/2"]
    assert sorted(one.trajectory_id for one in moves(stage)) == ["d/0/0/0", "d/0/0/3"]
    assert {one.n_tokens for one in moves(stage)} == {3}  # those that came in the same poll are kept
    lives(stage)


def test_a_rollout_without_its_engine_says_so_leaves_its_prompts_and_comes_back(stage: Stage) -> None:
    engine = lossy(always(ten()), away=3.0, tokens_per_s=50.0, clock=lambda: stage.world.now)
    rollout, other = stage.rollout(engine=engine, heartbeat_s=0.5), stage.rollout(1)
    incarnation = rollout.incarnation
    stage.until(lambda: says(stage, "idle") and says(stage, "idle", 1), rollout, other)
    stage.prompts(2)
    stage.until(lambda: says(stage, "sampling"), rollout, other)
    engine.lose()
    lost_at = stage.world.now
    stage.run(0.2, rollout, other)
    assert (stage.status().state, stage.status().version, stage.status().in_flight) == ("starting", -1, ())
    made = stage.prompts(8, first=2)
    stage.publish(1)
    stage.run(2.0, rollout, other)
    beats = [s for s in stage.read("rollouts.status", r.RolloutStatus) if s.rollout_id == "rollout-0"]
    assert sum(one.at_ms / 1000 > lost_at and one.state == "starting" for one in beats) >= 4
    starts = stage.read("trajectories.partial", r.TrajectoryStarted)
    takers = {s.prompt.prompt_id: s.rollout_id for s in starts}
    assert [takers.get(one.prompt_id) for one in made] == ["rollout-1"] * 8
    stage.until(lambda: stage.status().version == 1, rollout, other)
    assert stage.world.now - lost_at >= 3.0
    assert engine.loads == [0, 1]
    stage.prompts(8, first=10)
    stage.until(lambda: says(stage, "sampling"), rollout, other)
    assert rollout.incarnation == incarnation == stage.status().incarnation


def test_a_loss_is_told_in_one_line_and_counted(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    engine = lossy(always(ten()))
    stage.prompts(1)
    rollout = stage.rollout(engine=engine)
    gauges = rollout._context.measures.gauges
    stage.run(0.1, rollout)
    assert gauges["rollout_engine_losses"] == 0
    for times in (1, 2):
        stage.until(lambda: stage.status().version == 0, rollout)
        caplog.clear()
        engine.lose()
        stage.run(0.1, rollout)
        assert gauges["rollout_engine_losses"] == times == stage.status().engine_losses
        (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert "was lost in poll, as scripted" in line or "was lost in stats, as scripted" in line
        assert "\n" not in line
    assert gauges["rollout_version"] == -1


def test_a_trajectory_that_arrives_while_the_engine_is_away_goes_back_at_once(stage: Stage) -> None:
    engine = lossy(away=1000)
    rollout = stage.rollout(engine=engine)
    stage.until(lambda: says(stage, "idle"), rollout)
    engine.lose()
    stage.run(0.1, rollout)
    stage.adopt(rollout, version=0)
    stage.run(0.1, rollout)
    (moved,) = moves(stage)
    assert (moved.reason, moved.attempt, moved.n_tokens, moved.to_incarnation) == ("drain", 2, 5, 0)
    assert stage.status().in_flight == ()


@pytest.mark.parametrize("skip", range(4))
def test_an_engine_lost_in_the_middle_of_a_release_gives_each_trajectory_away_once(stage: Stage, skip: int) -> None:
    engine = lossy(always(ten(30)))
    stage.prompts(2)
    rollout, other = stage.rollout(engine=engine), stage.rollout(1, engine=lossy(always(ten(30))))
    stage.until(lambda: holds(stage, 8), rollout)
    stage.run(0.02, rollout)
    asked = [one.trajectory_id for one in stage.status().in_flight][2:6]
    release(stage, rollout, asked, other)
    engine.lose(at="abort", skip=skip)
    stage.run(0.05, rollout)
    assert engine.losses == 1
    where = {one.trajectory_id: (one.reason, one.to_incarnation) for one in moves(stage)}
    assert len(where) == len(moves(stage)) == 8
    assert {name for name, to in where.items() if to == ("repack", other.incarnation)} == set(asked)
    assert {to for name, to in where.items() if name not in asked} == {("lost", 0)}
    adopted = stage.read("rollouts.commands", r.AdoptCommand)
    assert sorted(one.snapshot.trajectory_id for one in adopted) == sorted(asked)
    stage.until(lambda: len(stage.completed()) == 8, rollout, other, repack(stage))
    lives(stage)


@pytest.mark.parametrize("skip", [0, 5])
def test_an_engine_lost_in_the_middle_of_a_drain_leaves_nothing_in_hand(stage: Stage, skip: int) -> None:
    engine = lossy(always(ten(30)))
    stage.prompts(2)
    rollout = stage.rollout(engine=engine)
    stage.until(lambda: holds(stage, 8), rollout)
    engine.lose(at="abort", skip=skip)
    assert rollout.drain(stage.world.now)
    assert engine.losses == 1
    assert len(moves(stage)) == len({one.trajectory_id for one in moves(stage)}) == 8
    assert all(one.to_incarnation == 0 for one in moves(stage))
    lives(stage)


def test_an_engine_lost_while_a_sleeper_forgets_its_work_is_no_reason_to_stop(stage: Stage) -> None:
    engine = lossy(always(ten(30)))
    stage.prompts(2)
    rollout = stage.rollout(engine=engine, lease_s=3.0)
    stage.until(lambda: holds(stage, 8), rollout)
    engine.lose(at="abort", skip=3)
    stage.world.advance(60.0)
    before = rollout.incarnation
    stage.run(0.5, rollout)
    assert engine.losses == 1
    assert rollout.incarnation > before
    assert moves(stage) == []
    stage.until(lambda: says(stage, "idle"), rollout)


def test_an_engine_lost_with_new_weights_is_no_death_of_what_it_held(stage: Stage) -> None:
    engine = lossy(always(ten(200)))
    stage.prompts(1)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.until(lambda: holds(stage, 4), rollout)
    stage.run(0.02, rollout)
    engine.lose(at="load")
    stage.publish(1)
    stage.run(0.1, rollout)
    assert engine.losses == 1
    assert {(one.reason, one.to_incarnation) for one in moves(stage)} == {("drain", 0)}
    assert all(one.n_tokens for one in moves(stage))
    stage.until(lambda: stage.status().version == 1, rollout)
    lives(stage)


def test_an_engine_lost_with_what_waits_for_a_version_keeps_its_tokens(stage: Stage) -> None:
    """Parked at another version, so never in the engine: its owner's engine is not what it died of."""
    engine = lossy(always(ten(200)), away=1000)
    stage.publish(1)
    rollout = stage.rollout(engine=engine)
    stage.prompts(1)
    stage.until(lambda: holds(stage, 4), rollout)
    stage.adopt(rollout, version=0, attempt=2)
    stage.until(lambda: holds(stage, 5), rollout)
    engine.lose(at="poll")
    stage.run(0.1, rollout)
    reasons = {one.trajectory_id: (one.reason, one.n_tokens) for one in moves(stage)}
    assert reasons.pop("d/0/50/0") == ("drain", 5)
    assert {reason for reason, _ in reasons.values()} == {"lost"}


def test_a_trajectory_that_brings_down_engine_after_engine_is_a_dead_letter_and_the_others_end(stage: Stage) -> None:
    def answers() -> ScriptedEngine:
        return lossy(by_trajectory({"d/0/1/2": ten(lose_at=0)}, ten()), away=20)

    stage.prompts(4)
    engines = answers(), answers()
    rollouts = [stage.rollout(index, engine=engine) for index, engine in enumerate(engines)]
    stage.until(lambda: len(stage.completed()) == 15 and bool(stage.letters()), *rollouts, repack(stage), limit_s=60)
    (letter,) = stage.letters()
    assert letter.trajectory_ids == ("d/0/1/2",)
    assert "engine" in letter.error
    assert sum(engine.losses for engine in engines) == 3
    assert "d/0/1/2" not in stage.completed()
    lives(stage)


@pytest.mark.parametrize("call", ["submit", "poll"])
def test_an_engine_lost_in_its_self_check_is_checked_again_once_it_is_back(stage: Stage, call: Call) -> None:
    engine = lossy(lambda request: right(request) if request.trajectory_id.startswith(RESERVED) else ten())
    stage.world.write(manifest(1))
    stage.prompts(1)
    rollout = stage.rollout(engine=engine)
    engine.lose(at=call, skip=1 if call == "submit" else 0)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert (engine.losses, engine.loads) == (1, [1, 1])
    assert sum(one.trajectory_id.startswith(RESERVED) for one in engine.submitted) in (5, 8)
    assert {one.version_min for one in stage.completed().values()} == {1}
    assert stage.status().engine_losses == 1


def test_what_is_being_taken_when_the_engine_is_lost_goes_to_the_pool_too(stage: Stage) -> None:
    beside, engine = Beside(), lossy(always(ten()), away=1000)
    rollout = stage.rollout(engine=engine, background=beside)
    stage.until(lambda: beside.open, rollout)
    beside.begun[-1].end()
    stage.run(0.02, rollout)
    stage.prompts(1)
    stage.until(lambda: beside.open, rollout)
    engine.lose(at="stats")
    stage.run(0.05, rollout)
    for one in beside.begun:
        one.end()
    stage.run(0.05, rollout)
    assert (engine.losses, engine.submitted) == (1, [])
    assert len(stage.read("trajectories.partial", r.TrajectoryStarted)) == 4
    assert {(one.reason, one.n_tokens, one.to_incarnation) for one in moves(stage)} == {("drain", 0, 0)}
    assert len(moves(stage)) == 4
    lives(stage)


@pytest.mark.parametrize("call", ["load", "poll"])
def test_an_engine_that_is_lost_time_and_again_before_its_first_token_takes_the_process_along(
    stage: Stage, call: Call
) -> None:
    class Broken(ScriptedEngine):
        """Lost at this call whenever it has come back."""

        def poll(self, timeout_s: float) -> list[Delta]:
            deltas = super().poll(timeout_s)
            if self.ready and self.version < 0:
                self.lose(at=call)
            return deltas

    engine = Broken(always(ten()), max_running=8, away=1)
    rollout, other = stage.rollout(engine=engine), stage.rollout(1)
    stage.until(lambda: says(stage, "idle"), rollout, other)
    stage.prompts(40)
    engine.lose(at="poll")
    with pytest.raises(Unavailable, match=r"lost its engine 5 times without a token in between: .*as scripted"):
        stage.run(5.0, rollout, other, repack(stage))
    assert engine.losses == 5


def test_an_engine_that_lives_in_the_operators_process_ends_it(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(crash_at=3)), max_running=8)
    stage.prompts(1)
    rollout = stage.rollout(engine=engine)
    with pytest.raises(Unavailable, match="crashed at token 3"):
        stage.run(1.0, rollout)
    with pytest.raises(Unavailable, match="its process has to start anew"):
        engine.restart("a test")
