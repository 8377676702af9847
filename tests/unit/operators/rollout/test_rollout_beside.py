"""Transactions made beside the step: the engine goes on, and what follows from them waits for their outcome."""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, LaminarError
from tests.unit.operators.rollout.stage import FailingCommits, Stage, ten


class Beside:
    """Calls that end when the test says so, or (``most``) after so many looks at them at most."""

    def __init__(self, *, most: int | None = None, seed: int = 0) -> None:
        self.begun: list[Beside.One] = []
        self._most = most
        self._rng = random.Random(seed)

    class One:
        def __init__(self, call: Callable[[], None], looks: int | None) -> None:
            self._call = call
            self._looks = looks
            self._ended = False
            self._error: LaminarError | None = None

        def end(self) -> None:
            if not self._ended:
                self._ended = True
                try:
                    self._call()
                except LaminarError as error:
                    self._error = error

        def done(self) -> bool:
            if self._looks is not None:
                self._looks -= 1
                if self._looks < 0:
                    self.end()
            return self._ended

        def wait(self, timeout_s: float) -> bool:
            self.end()
            return True

        def result(self) -> None:
            assert self._ended
            if self._error is not None:
                raise self._error

    def __call__(self, call: Callable[[], None]) -> Beside.One:
        looks = None if self._most is None else self._rng.randrange(self._most + 1)
        self.begun.append(Beside.One(call, looks))
        return self.begun[-1]

    @property
    def open(self) -> bool:
        return bool(self.begun) and not self.begun[-1]._ended


def _engine(n: int = 10) -> ScriptedEngine:
    return ScriptedEngine(always(ten(n)), max_running=8)


def test_groups_begin_once_their_start_is_committed(stage: Stage) -> None:
    beside, engine = Beside(), _engine()
    rollout = stage.rollout(engine=engine, background=beside)
    stage.until(lambda: beside.open, rollout)
    beside.begun[-1].end()  # the first heartbeat
    stage.run(0.02, rollout)
    stage.prompts(1)
    stage.until(lambda: beside.open, rollout)
    stage.run(0.1, rollout)
    assert engine.submitted == []
    assert stage.read("trajectories.partial", r.TrajectoryStarted) == []
    beside.begun[-1].end()
    stage.run(0.02, rollout)
    assert len(engine.submitted) == len(stage.read("trajectories.partial", r.TrajectoryStarted)) == 4


def test_no_version_is_loaded_while_groups_are_being_taken(stage: Stage) -> None:
    beside, engine = Beside(), _engine()
    rollout = stage.rollout(engine=engine, background=beside)
    stage.until(lambda: beside.open, rollout)
    beside.begun[-1].end()
    stage.run(0.02, rollout)
    stage.prompts(1)
    stage.until(lambda: beside.open, rollout)
    stage.publish(1)
    stage.run(0.1, rollout)
    assert engine.loads == [0]
    beside.begun[-1].end()
    beside._most = 0
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert {(one.version_min, one.version_max) for one in stage.completed().values()} == {(0, 0)}
    stage.until(lambda: engine.loads == [0, 1], rollout)


def test_the_engine_goes_on_while_results_are_written(stage: Stage) -> None:
    beside, engine = Beside(most=0), _engine(40)
    rollout = stage.rollout(engine=engine, background=beside)
    stage.prompts(2)
    stage.until(lambda: engine.stats().running == 8, rollout)
    beside._most = None
    stage.until(lambda: beside.open, rollout)
    before = engine.stats().kv_used
    stage.run(0.1, rollout)
    assert engine.stats().kv_used >= before + 8 * 5
    beside.begun[-1].end()
    beside._most = 0
    stage.until(lambda: len(stage.completed()) == 8, rollout)


def test_what_was_begun_by_one_that_lost_its_lease_meanwhile_is_left_to_others(stage: Stage) -> None:
    beside, engine = Beside(), _engine()
    rollout = stage.rollout(engine=engine, background=beside, lease_s=1.0)
    stage.until(lambda: beside.open, rollout)
    beside.begun[-1].end()
    stage.run(0.02, rollout)
    stage.prompts(1)
    stage.until(lambda: beside.open, rollout)
    first = rollout.incarnation
    stage.run(1.5, rollout)
    assert rollout.incarnation > first
    beside.begun[-1].end()
    stage.run(0.1, rollout)
    started = stage.read("trajectories.partial", r.TrajectoryStarted)
    assert [one.incarnation for one in started] == [first] * 4
    assert engine.submitted == []


def test_a_rollout_that_is_asked_to_stop_waits_for_what_is_being_written(stage: Stage) -> None:
    beside, engine = Beside(most=0), _engine(40)
    rollout = stage.rollout(engine=engine, background=beside)
    stage.prompts(1)
    stage.until(lambda: engine.stats().running == 4, rollout)
    beside._most = None
    stage.until(lambda: beside.open, rollout)
    while not rollout.drain(stage.world.now):
        stage.world.advance(0.01)
    rollout.close()
    moved = stage.read("trajectories.partial", r.TrajectoryMoved)
    assert len(moved) == 4
    for one in moved:
        _contiguous(stage, one.trajectory_id, one.n_tokens)


def test_each_token_is_written_once_whatever_is_aborted_and_however_long_it_takes(stage: Stage) -> None:
    rng = random.Random(7)
    faults = FailingCommits()
    beside, engine = Beside(most=12, seed=1), ScriptedEngine(lambda q: ten(3 + q.seed % 40), max_running=8)
    rollout = stage.rollout(engine=engine, background=beside, faults=faults, delta_s=0.02, heartbeat_s=0.1)
    stage.prompts(12)
    for _ in range(2000):
        if rng.random() < 0.05 and not faults.times:
            faults.next(Aborted)
        stage.run(0.01, rollout)
        if len(stage.completed()) == 48 and not faults.times:
            break
    assert len(stage.completed()) == 48
    assert len({one.trajectory_id for one in stage.read("trajectories.partial", r.TrajectoryStarted)}) == 48
    assert len(stage.read("trajectories.partial", r.TrajectoryStarted)) == 48
    for one in stage.completed().values():
        _contiguous(stage, one.trajectory_id, one.response.n_tokens, at_most=True)
    stage.run(0.5, rollout)
    assert stage.status().in_flight == ()
    assert stage.status().state == "idle"


def _contiguous(stage: Stage, trajectory_id: str, n: int, *, at_most: bool = False) -> None:
    """Its deltas follow each other, and hold all its tokens (or those before the last ones)."""
    at = 0
    for event in stage.partial(trajectory_id):
        if isinstance(event, r.TrajectoryTokens):
            assert event.start == at
            at += event.tokens.n_tokens
    assert at <= n if at_most else at == n
