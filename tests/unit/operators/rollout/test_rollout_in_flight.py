"""``updates: in_flight``: new weights under trajectories that are being sampled, and what their tokens say."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always, by_trajectory
from laminar.operators.rollout.operator import Rollout
from laminar.operators.rollout.round import Holding, may_sample, takes_groups, version_to_load
from laminar.schemas import records as r
from tests.support.dataflow import make_prompt
from tests.unit.operators.rollout.stage import Stage, ten

LONG = r.Sampling(max_tokens=1000)


def adopt(stage: Stage, rollout: Rollout, *, version: int, n: int = 5, index: int = 50, min_version: int = 0) -> str:
    """An Adopt for member 0 of a group, whose last token is of ``version``."""
    return stage.adopt(rollout, version=version, index=index, n=n, first=100, sampling=LONG, min_version=min_version)


def versions(one: r.CompletedTrajectory) -> list[int]:
    """Of each token."""
    found: list[int] = one.response.versions_T.tolist()
    return found


def test_c4_each_token_has_the_version_that_sampled_it_while_versions_come(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(40)), max_running=8, version_ids=True)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(30, sampling=LONG)
    for version in range(1, 20):
        stage.run(0.17, rollout)
        stage.publish(version)
    stage.until(lambda: len(stage.completed()) == 120, rollout)
    for one in stage.completed().values():
        assert one.response.ids_T.tolist() == versions(one)
        assert (np.diff(versions(one)) >= 0).all()
        assert (one.version_min, one.version_max) == (versions(one)[0], versions(one)[-1])
        assert one.updates == "in_flight"
    assert max(len(set(versions(one))) for one in stage.completed().values()) > 2
    assert engine.loads == list(range(20))


def test_c4_tokens_decoded_while_a_relay_fetches_the_next_version_carry_the_one_before(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(60)), max_running=8, version_ids=True)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(1, group_size=1, sampling=LONG)
    stage.run(0.1, rollout)
    stage.weights.coming.add(1)
    stage.publish(1)
    stage.run(0.3, rollout)
    assert (stage.weights.opened, engine.loads) == ([0], [0])
    sampled = engine.stats().kv_used
    stage.run(0.1, rollout)
    assert engine.stats().kv_used > sampled  # it waits for nothing
    stage.weights.coming.clear()
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    [one] = stage.completed().values()
    assert one.response.ids_T.tolist() == versions(one)
    assert set(versions(one)) == {0, 1}
    assert versions(one).count(0) > 40


def test_groups_are_taken_while_the_next_version_is_on_its_way_but_not_two_behind(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(100)), max_running=12)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.run(0.05, rollout)
    stage.weights.coming.update({1, 2})
    stage.publish(1)
    stage.prompts(1, sampling=LONG)
    stage.run(0.1, rollout)
    assert len(engine.submitted) == 4
    stage.publish(2)
    stage.run(0.1, rollout)
    stage.prompts(1, first=1, sampling=LONG)
    stage.run(0.1, rollout)
    assert len(engine.submitted) == 4
    stage.weights.coming.clear()
    stage.run(0.1, rollout)
    assert (len(engine.submitted), engine.loads) == (8, [0, 2])


def test_an_adopted_trajectory_of_an_older_version_goes_on_at_once_under_the_one_held(stage: Stage) -> None:
    for version in (1, 2, 3):
        stage.publish(version)
    engine = ScriptedEngine(always(ten(20)), max_running=8)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.run(0.1, rollout)
    name = adopt(stage, rollout, version=1)
    stage.until(lambda: name in stage.completed(), rollout)
    assert versions(stage.completed()[name]) == [1] * 5 + [3] * 15
    assert engine.loads == [3]


def test_an_adopted_trajectory_of_a_newer_version_waits_for_it_and_groups_are_taken_meanwhile(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(20)), max_running=8)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.run(0.05, rollout)
    stage.weights.coming.add(1)
    stage.publish(1)
    waiting = {
        adopt(stage, rollout, version=1),
        adopt(stage, rollout, version=1, n=0, index=51, min_version=1),
    }
    stage.run(0.1, rollout)
    stage.prompts(1, sampling=LONG)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert not waiting & {request.trajectory_id for request in engine.submitted}
    assert stage.status().waiting == 2
    stage.weights.coming.clear()
    stage.until(lambda: len(stage.completed()) == 6, rollout)
    assert {v for name in waiting for v in versions(stage.completed()[name])} == {1}


def test_what_waits_for_a_version_that_this_rollout_cannot_get_is_handed_back(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(20)), max_running=8)
    rollout = stage.rollout(engine=engine, updates="in_flight", old_version_attempts=2)
    stage.run(0.05, rollout)
    stage.weights.missing.add(1)
    stage.publish(1)
    stage.prompts(1, sampling=LONG)
    stage.run(0.05, rollout)
    name = adopt(stage, rollout, version=1)
    stage.until(lambda: bool(stage.partial(name)), rollout)
    [moved] = stage.partial(name)
    assert (moved.reason, moved.attempt, moved.n_tokens, moved.to_incarnation) == ("handback", 2, 5, 0)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert {v for one in stage.completed().values() for v in versions(one)} == {0}


def test_a_load_waits_for_the_answers_of_an_evaluation_which_is_of_one_version(stage: Stage) -> None:
    answers = {"eval/0/0/0": ten(30), "eval/0/1/0": ten(60)}
    engine = ScriptedEngine(by_trajectory(answers, ten(200)), max_running=8, version_ids=True)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.run(0.05, rollout)
    for index in range(2):
        one = make_prompt(index, prompt_id=f"eval/0/{index}", purpose="eval", group_size=1, sampling=LONG)
        stage.world.write(one)
    stage.prompts(1, group_size=1, sampling=LONG)
    stage.run(0.1, rollout)
    stage.publish(1)
    stage.until(lambda: len(stage.completed()) == 3, rollout)
    answered = {name: set(versions(one)) for name, one in stage.completed().items()}
    assert answered.pop("d/0/0/0") == {0, 1}
    assert set(map(frozenset, answered.values())) == {frozenset({0})}


def test_a_trajectory_that_fails_in_the_engine_begins_again_after_its_last_sound_token(stage: Stage) -> None:
    engine = ScriptedEngine(always(Answer(ids=tuple(range(40)), fail_times=1, fail_at=25)), version_ids=True)
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(1, group_size=1, sampling=LONG)
    for version in range(1, 6):
        stage.run(0.07, rollout)
        stage.publish(version)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    [one] = stage.completed().values()
    assert one.response.n_tokens == 40
    assert one.response.ids_T.tolist() == versions(one)
    assert (np.diff(versions(one)) >= 0).all()


def test_a_rollout_that_gets_no_weights_goes_on_with_what_it_holds_and_says_so_once_it_lags(stage: Stage) -> None:
    relay, rollout = stage.weights, stage.rollout(0, updates="in_flight", lease_s=5.0)
    stage.weights = type(relay)()
    other = stage.rollout(1, updates="in_flight", lease_s=5.0)
    stage.run(1.0, rollout, other)
    relay.missing.update({1, 2})
    for version in (1, 2):
        stage.publish(version)
        stage.run(0.5, rollout, other)
    stage.prompts(16)
    stage.until(lambda: len(stage.completed()) == 64, rollout, other, limit_s=20.0)
    relay.missing.clear()
    stage.run(6.0, rollout, other)
    stage.prompts(16, first=16)
    stage.until(lambda: len(stage.completed()) == 128, rollout, other)
    assert {one.rollout_id for one in stage.completed().values()} == {"rollout-0", "rollout-1"}


def test_what_a_rollout_says_tells_how_it_takes_new_weights(stage: Stage) -> None:
    rollout = stage.rollout(updates="in_flight")
    stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert stage.status().updates == "in_flight"
    assert {one.updates for one in stage.read("trajectories.partial", r.TrajectoryStarted)} == {"in_flight"}


def test_the_rule_in_flight() -> None:
    def holding(**values: int) -> Holding:
        return Holding(**{"version": 3, "newest": 4, "sampling": 5, **values}, updates="in_flight")

    assert version_to_load(holding()) == 4
    assert version_to_load(holding(answering=1)) is None
    assert version_to_load(holding(newest=3)) is None
    assert version_to_load(holding(newest=-1)) is None
    assert version_to_load(holding(version=-1)) == 4
    assert takes_groups(holding(), top_up_lag=2)
    assert not takes_groups(holding(), top_up_lag=1)
    assert not takes_groups(holding(version=-1, newest=0), top_up_lag=2)
    assert may_sample("in_flight", held=4, newest_token=3, min_version=0)
    assert not may_sample("in_flight", held=2, newest_token=3, min_version=0)
    assert not may_sample("in_flight", held=2, newest_token=-1, min_version=3)
    assert not may_sample("in_flight", held=-1, newest_token=-1, min_version=0)
    assert not may_sample("pinned", held=4, newest_token=3, min_version=0)
    assert may_sample("pinned", held=3, newest_token=3, min_version=0)
    assert may_sample("pinned", held=4, newest_token=-1, min_version=4)


EVENT = st.one_of(
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("arrive"), st.none()),
    st.tuples(st.just("lose"), st.none()),
    st.tuples(st.just("adopt"), st.integers(-1, 2)),
    st.tuples(st.just("prompts"), st.integers(1, 2)),
    st.tuples(st.just("wait"), st.sampled_from([0.02, 0.1, 0.4])),
)


@given(st.lists(EVENT, max_size=25))
@settings(max_examples=60, deadline=None)
def test_c4_whatever_comes_when_the_log_says_the_version_of_every_token_and_all_come_to_their_end(
    events: list[tuple[str, Any]],
) -> None:
    stage = Stage()
    stage.publish(0)
    engine = ScriptedEngine(always(ten(25)), max_running=8, version_ids=True)
    rollout = stage.rollout(engine=engine, updates="in_flight", load_backoff_s=0.05)
    newest = groups = adopted = 0
    for kind, what in events:
        if kind == "publish":
            newest += 1
            if what:
                stage.weights.coming.add(newest)
            stage.publish(newest)
        elif kind == "arrive":
            stage.weights.coming.clear()
        elif kind == "lose":
            stage.weights.missing.add(newest)
        elif kind == "adopt":
            stage.run(0.02, rollout)
            adopt(stage, rollout, version=max(0, newest - max(0, what)), n=5 if what >= 0 else 0, index=100 + adopted)
            adopted += 1
        elif kind == "prompts":
            stage.prompts(what, first=groups, sampling=LONG, min_version=max(0, newest - 1))
            groups += what
        else:
            stage.run(what, rollout)
    stage.weights.coming.clear()
    stage.publish(newest + 1)
    handed_back: set[str] = set()

    def all_done() -> bool:
        moves = stage.read("trajectories.partial", r.TrajectoryMoved)
        handed_back.update(one.trajectory_id for one in moves)
        return len(stage.completed()) + len(handed_back) == 4 * groups + adopted

    stage.until(all_done, rollout, limit_s=60.0)
    for one in stage.completed().values():
        begun = 5 if one.response.ids_T[0] == 100 else 0
        assert one.response.ids_T.tolist()[begun:] == versions(one)[begun:]
        assert versions(one) == sorted(versions(one))
        assert one.version_min >= one.prompt.min_version
