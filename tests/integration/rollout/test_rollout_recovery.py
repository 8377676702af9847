"""Rollouts and repack over one log: what a dead, stopped or sleeping rollout had in hand is finished by others."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.engines.scripted import ScriptedEngine, by_trajectory, seeded
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, LaminarError, Unavailable
from laminar.streams.memory import NoFaults, Point
from tests.unit.operators.rollout.stage import Stage, ten

LONG = r.Sampling(max_tokens=1000)


@pytest.fixture
def stage() -> Stage:
    """Version 0 is published."""
    made = Stage()
    made.publish(0)
    return made


def repack(stage: Stage, index: int = 0) -> Repack:
    config = RepackConfig(period_s=1.0, dead_after_s=3.0, version_wait_s=2.0)
    return Repack(config, replace(stage.world.context("repack"), instance=f"repack-{index}"))


def test_b13_after_a_restart_only_the_missing_member_of_a_group_is_generated(stage: Stage) -> None:
    answers = {"d/0/0/5": ten(500)}
    first = stage.rollout(engine=ScriptedEngine(by_trajectory(answers, ten()), max_running=8))
    mover = repack(stage)
    stage.prompts(1, group_size=8, sampling=LONG)
    stage.until(lambda: len(stage.completed()) == 7, first, mover)
    stage.run(1.0, first, mover)
    first.close()  # killed: no drain
    engine = ScriptedEngine(by_trajectory(answers, ten()), max_running=8)
    second = stage.rollout(engine=engine)
    stage.until(lambda: len(stage.completed()) == 8, second, mover)
    assert [request.trajectory_id for request in engine.submitted] == ["d/0/0/5"]
    assert engine.submitted[0].sampled.n_tokens >= 100
    one = stage.completed()["d/0/0/5"]
    assert one.attempt == 2  # repack took it
    assert one.response.ids_T.tolist() == list(range(100, 600))
    assert len(stage.read("trajectories.partial", r.TrajectoryStarted)) == 8


def test_a5_groups_of_a_rollout_that_never_answers_are_finished_by_another(stage: Stage) -> None:
    silent = stage.rollout(0, engine=ScriptedEngine(by_trajectory({}, ten(hang_at=0)), max_running=12), lease_s=3.0)
    stage.prompts(3)
    stage.run(0.2, silent)
    mover = repack(stage)
    other = stage.rollout(1, engine=ScriptedEngine(by_trajectory({}, ten()), max_running=4))
    stage.until(lambda: len(stage.completed()) == 12, other, mover)
    assert {one.rollout_id for one in stage.completed().values()} == {"rollout-1"}


def test_a6_an_engine_killed_mid_generation_loses_no_trajectory_and_few_tokens(stage: Stage) -> None:
    dying = stage.rollout(0, engine=ScriptedEngine(by_trajectory({}, ten(80, crash_at=50)), max_running=8))
    stage.prompts(2, sampling=LONG)
    with pytest.raises(Unavailable):
        stage.run(5.0, dying)
    dying.close()
    mover = repack(stage)
    engine = ScriptedEngine(by_trajectory({}, ten(80)), max_running=8)
    again = stage.rollout(0, engine=engine)
    stage.until(lambda: len(stage.completed()) == 8, again, mover)
    assert min(request.sampled.n_tokens for request in engine.submitted) >= 40
    for one in stage.completed().values():
        assert one.response.ids_T.tolist() == list(range(100, 180))


def test_a_stopped_rollouts_trajectories_are_placed_without_waiting_for_its_death(stage: Stage) -> None:
    stopping = stage.rollout(0, engine=ScriptedEngine(by_trajectory({}, ten(100)), max_running=8))
    other = stage.rollout(1, engine=ScriptedEngine(by_trajectory({}, ten(100)), max_running=8))
    mover = repack(stage)
    stage.run(0.5, stopping, other, mover)
    stage.prompts(1, sampling=LONG)
    stage.run(0.5, stopping, other, mover)
    for rollout in (stopping, other):
        if rollout._work.ledger:  # whichever got the group
            while not rollout.drain(stage.world.now):
                pass
            rollout.close()
        else:
            rest = rollout
    before = stage.world.now
    stage.until(lambda: len(stage.completed()) == 4, rest, mover)
    assert stage.world.now - before < 2.0


def test_repack_empties_the_tail_and_every_trajectory_keeps_its_tokens_and_version(stage: Stage) -> None:
    answers = {f"d/0/{i}/0": ten(600) for i in range(6)}
    rollouts = [
        stage.rollout(i, engine=ScriptedEngine(by_trajectory(answers, ten()), max_running=16)) for i in range(3)
    ]
    mover = repack(stage)
    stage.run(0.2, *rollouts, mover)
    stage.prompts(6, sampling=LONG)
    stage.until(lambda: len(stage.completed()) == 24, *rollouts, mover, limit_s=60)
    moved = stage.read("trajectories.partial", r.TrajectoryMoved)
    assert {one.reason for one in moved} == {"repack"}
    for index in range(6):
        one = stage.completed()[f"d/0/{index}/0"]
        assert one.response.ids_T.tolist() == list(range(100, 700))


class Crash(BaseException):
    """The process dies here."""


class Trouble(NoFaults):
    """Commits that abort, and processes that die in front of, inside or behind one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.on = True

    def at(self, point: Point, transactional_id: str) -> None:
        draw = self.rng.random()
        if not self.on:
            return
        if point == "before_commit" and draw < 0.03:
            raise Aborted(f"{transactional_id}: drawn")
        if draw > 0.995:
            raise Crash


@pytest.mark.parametrize("seed", range(8))
def test_b1_crashes_aborts_and_sleepers_leave_exactly_one_fate_for_each_member(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    trouble = Trouble(rng)
    script = seeded(min_tokens=5, max_tokens=150)
    answers = {"d/0/3/1": ten(40, fail_times=99, fail_at=7)}

    def start(index: int) -> Rollout:
        def answer(request: object) -> object:
            return answers.get(request.trajectory_id) or script(request)  # type: ignore[attr-defined]

        engine = ScriptedEngine(answer, max_running=12, kv_total=700)  # type: ignore[arg-type]
        return stage.rollout(
            index, engine=engine, faults=trouble, lease_s=2.0, finish_s=0.02, max_in_flight=rng.choice([None, 4, 30])
        )

    rollouts = {i: start(i) for i in range(3)}
    asleep: dict[int, float] = {}
    mover = repack(stage)
    stage.prompts(20, sampling=r.Sampling(max_tokens=120))
    version = 0
    began = stage.world.now
    while stage.world.now - began < 200.0:
        fates = len(stage.completed()) + len(stage.letters())
        if fates >= 80:
            break
        trouble.on = stage.world.now - began < 30.0
        if trouble.on and rng.random() < 0.01:
            version += 1
            stage.publish(version)
            stage.weights.missing.discard(version - 3)
            stage.weights.missing.add(version - 4)
        for index in list(rollouts):
            if asleep.get(index, 0.0) > stage.world.now:
                continue
            if trouble.on and rng.random() < 0.001:
                asleep[index] = stage.world.now + rng.uniform(0.5, 8.0)
                continue
            try:
                if trouble.on and rng.random() < 0.001:
                    while not rollouts[index].drain(stage.world.now):
                        pass
                    raise Crash
                rollouts[index].step(stage.world.now)
            except (Crash, LaminarError):
                # kill -9: nothing is closed; its group membership ends with its session or its instance's return
                rollouts[index] = start(index)
        mover.step(stage.world.now)
        stage.world.advance(0.02)
    members = {r.trajectory_id(f"d/0/{i}", m) for i in range(20) for m in range(4)}
    fate = Counter([one.trajectory_id for one in stage.read("trajectories.completed", r.CompletedTrajectory)])
    dead = {name for letter in stage.letters() for name in letter.trajectory_ids}
    assert fate.keys() | dead == members
    assert dead <= {"d/0/3/1"}
    started = Counter(one.trajectory_id for one in stage.read("trajectories.partial", r.TrajectoryStarted))
    assert set(started.values()) == {1}
    for one in stage.read("trajectories.completed", r.CompletedTrajectory):
        assert one.version_min == one.version_max
    assert set(fate.values()) == {1}
