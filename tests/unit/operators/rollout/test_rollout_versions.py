"""Policy versions: which one is loaded when, and that a trajectory has only one."""

from __future__ import annotations

import pytest

from laminar.operators.rollout.engines.scripted import ScriptedEngine, always, by_trajectory
from laminar.operators.rollout.operator import Rollout
from laminar.operators.rollout.round import Holding, takes_groups, version_to_load
from laminar.schemas import records as r
from laminar.schemas.errors import WeightsMismatch
from laminar.schemas.tokens import Tokens
from tests.unit.operators.rollout.stage import RelayStandIn, Stage, ten

LONG = r.Sampling(max_tokens=1000)


def adopt(stage: Stage, rollout: Rollout, *, version: int, n: int = 5, attempt: int = 1, index: int = 50) -> str:
    """An Adopt for member 0 of a group, sampled by ``version`` so far."""
    return stage.adopt(rollout, version=version, index=index, attempt=attempt, n=n, first=100, sampling=LONG)


def test_c8_pinned_each_trajectory_has_one_version_while_versions_come_and_go(stage: Stage) -> None:
    answers = {f"d/0/{i}/0": ten(40) for i in range(40)}
    engine = ScriptedEngine(by_trajectory(answers, ten()), max_running=8)
    rollout = stage.rollout(engine=engine)
    stage.prompts(30, sampling=LONG)
    for version in range(1, 12):
        stage.run(0.35, rollout)
        stage.publish(version)
    stage.until(lambda: len(stage.completed()) == 120, rollout)
    for one in stage.completed().values():
        assert set(one.response.versions_T.tolist()) == {one.version_min} == {one.version_max}
    assert len({one.version_min for one in stage.completed().values()}) > 5


def test_a_round_ends_before_a_newer_version_is_loaded_and_no_group_is_taken_meanwhile(stage: Stage) -> None:
    engine = ScriptedEngine(by_trajectory({"d/0/0/0": ten(100)}, ten()), max_running=8)
    rollout = stage.rollout(engine=engine)
    stage.run(0.05, rollout)
    stage.prompts(1, sampling=LONG)
    stage.run(0.05, rollout)
    stage.publish(1)
    stage.run(0.05, rollout)
    stage.prompts(3, first=1)
    stage.run(0.5, rollout)
    assert (engine.version, len(engine.submitted)) == (0, 4)
    stage.until(lambda: len(stage.completed()) == 16, rollout)
    assert engine.loads == [0, 1]
    assert {c.version_min for c in stage.completed().values() if c.prompt.index > 0} == {1}


def test_with_a_top_up_lag_groups_are_still_taken_under_a_version_that_is_a_little_old(stage: Stage) -> None:
    engine = ScriptedEngine(by_trajectory({"d/0/0/0": ten(100)}, ten()), max_running=8)
    rollout = stage.rollout(engine=engine, top_up_lag=2)
    stage.run(0.05, rollout)
    stage.prompts(1, sampling=LONG)
    stage.run(0.05, rollout)
    stage.publish(1)
    stage.prompts(1, first=1)
    stage.run(0.3, rollout)
    assert (engine.version, len(engine.submitted)) == (0, 8)
    stage.publish(2)
    stage.run(0.05, rollout)
    stage.prompts(1, first=2)
    stage.run(0.2, rollout)
    assert (engine.version, len(engine.submitted)) == (0, 8)


def test_only_committed_versions_are_loaded_and_none_of_an_older_epoch(stage: Stage) -> None:
    rollout = stage.rollout()
    stage.publish(1, state="prepared")
    stage.run(0.1, rollout)
    assert stage.weights.opened == [0]
    stage.publish(1, epoch=2, state="prepared")
    stage.publish(7, epoch=1)  # the replaced trainer wakes up
    stage.run(0.1, rollout)
    assert stage.weights.opened == [0]
    stage.publish(1, epoch=2)
    stage.run(0.1, rollout)
    assert stage.weights.opened == [0, 1]


def test_a_rollout_that_starts_late_loads_the_newest_version_only(stage: Stage) -> None:
    for version in range(1, 200):
        stage.publish(version)
    rollout = stage.rollout()
    stage.run(0.2, rollout)
    assert stage.weights.opened == [199]


def test_weights_that_no_relay_has_are_asked_for_again_with_back_off(stage: Stage) -> None:
    stage.weights.missing.add(0)
    rollout = stage.rollout(load_backoff_s=0.2, load_backoff_max_s=1.0)
    stage.prompts(1)
    stage.run(10.0, rollout)
    assert 8 <= len(stage.weights.opened) <= 14
    assert stage.status().state == "starting"
    stage.weights.missing.clear()
    stage.until(lambda: len(stage.completed()) == 4, rollout)


def test_a_version_that_is_superseded_while_it_cannot_be_had_is_skipped(stage: Stage) -> None:
    stage.weights.missing.update({1, 2})
    rollout = stage.rollout()
    stage.run(0.05, rollout)
    for version in (1, 2, 3):
        stage.publish(version)
        stage.run(0.05, rollout)
    stage.run(2.0, rollout)
    assert stage.weights.opened[-1] == 3
    assert stage.status().version == 3


def test_weights_that_the_engine_refuses_end_the_process(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten()), refuse_versions=frozenset({0})))
    with pytest.raises(WeightsMismatch):
        stage.run(0.1, rollout)


def test_an_idle_rollout_loads_the_older_version_that_an_adopted_trajectory_needs(stage: Stage) -> None:
    for version in (1, 2, 3):
        stage.publish(version)
    engine = ScriptedEngine(always(ten(20)), max_running=8)
    rollout = stage.rollout(engine=engine)
    stage.run(0.1, rollout)
    name = adopt(stage, rollout, version=1)
    stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 5, rollout)
    assert engine.loads == [3, 1, 3]
    one = stage.completed()[name]
    assert set(one.response.versions_T.tolist()) == {1}
    assert one.response.ids_T.tolist() == list(range(100, 120))
    assert {c.version_min for c in stage.completed().values() if c.trajectory_id != name} == {3}


def test_an_adopted_trajectory_of_another_version_waits_for_the_end_of_the_round(stage: Stage) -> None:
    stage.publish(1)
    engine = ScriptedEngine(always(ten(60)), max_running=16)
    rollout = stage.rollout(engine=engine)
    stage.prompts(1, sampling=LONG)
    stage.run(0.1, rollout)
    name = adopt(stage, rollout, version=0)
    stage.run(0.1, rollout)
    stage.prompts(4, first=1, sampling=LONG)
    stage.until(lambda: name in stage.completed(), rollout)
    assert engine.loads == [1, 0]
    assert len(stage.completed()) == 5
    assert set(stage.completed()[name].response.versions_T.tolist()) == {0}
    stage.until(lambda: len(stage.completed()) == 21, rollout)


def test_a_trajectory_without_tokens_is_adopted_under_any_version(stage: Stage) -> None:
    for version in (1, 2):
        stage.publish(version)
    engine = ScriptedEngine(always(ten()))
    rollout = stage.rollout(engine=engine)
    stage.run(0.1, rollout)
    name = adopt(stage, rollout, version=0, n=0)
    stage.until(lambda: name in stage.completed(), rollout)
    assert engine.loads == [2]
    assert stage.completed()[name].version_min == 2


def test_a_version_that_is_gone_sends_its_trajectories_back_and_groups_are_taken_again(stage: Stage) -> None:
    for version in (1, 2):
        stage.publish(version)
    stage.weights.missing.add(1)
    rollout = stage.rollout(old_version_attempts=2)
    stage.run(0.1, rollout)
    name = adopt(stage, rollout, version=1)
    other = adopt(stage, rollout, version=-1 + 1, index=51)
    stage.weights.missing.add(0)
    stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    for trajectory in (name, other):
        moved = stage.partial(trajectory)[-1]
        assert isinstance(moved, r.TrajectoryMoved)
        assert (moved.reason, moved.attempt, moved.n_tokens) == ("handback", 2, 5)
    assert stage.weights.opened.count(1) == 2


def test_the_rule_of_rounds() -> None:
    assert takes_groups(Holding(version=3, newest=3, sampling=5), top_up_lag=1)
    assert not takes_groups(Holding(version=-1, newest=-1, sampling=0), top_up_lag=1)
    assert not takes_groups(Holding(version=3, newest=3, sampling=5, parked=(2,)), top_up_lag=1)
    assert version_to_load(Holding(version=3, newest=4, sampling=1)) is None
    assert version_to_load(Holding(version=3, newest=4, sampling=0, parked=(2,))) == 2
    assert version_to_load(Holding(version=3, newest=3, sampling=0)) is None
    assert version_to_load(Holding(version=-1, newest=-1, sampling=0)) is None


def test_tokens_sampled_under_two_versions_would_be_seen(stage: Stage) -> None:
    """The check of C8 above can fail: an engine whose weights change under way gives two versions."""
    engine = ScriptedEngine(always(ten(40)))
    rollout = stage.rollout(engine=engine)
    stage.prompts(1, group_size=1, sampling=LONG)
    stage.run(0.2, rollout)
    engine.load({}, 5)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    [one] = stage.completed().values()
    assert (one.version_min, one.version_max) == (0, 5)
    assert isinstance(one.response, Tokens)


def test_a_rollout_that_gets_no_weights_leaves_its_prompts_to_others_and_comes_back(stage: Stage) -> None:
    stage.publish(1)
    relay = stage.weights
    cut_off = stage.rollout(0, lease_s=5.0)
    stage.weights = RelayStandIn()
    other = stage.rollout(1, lease_s=5.0)
    stage.run(1.0, cut_off, other)
    relay.missing.add(2)
    stage.publish(2)
    stage.run(0.5, cut_off, other)
    stage.prompts(16)
    stage.until(lambda: len(stage.completed()) == 64, cut_off, other, limit_s=20.0)
    relay.missing.clear()
    stage.run(6.0, cut_off, other)
    stage.prompts(16, first=16)
    stage.until(lambda: len(stage.completed()) == 128, cut_off, other)
    assert {one.rollout_id for one in stage.completed().values()} == {"rollout-0", "rollout-1"}
