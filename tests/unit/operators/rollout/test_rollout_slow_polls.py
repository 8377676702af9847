"""An engine whose polls take longer than the lease: what it samples gets through all the same."""

from __future__ import annotations

from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.schemas import records as r
from tests.unit.operators.rollout.stage import Stage, ten


class SlowEngine(ScriptedEngine):
    """Each poll takes ``poll_s``, during which repack goes on."""

    poll_s = 0.0
    stage: Stage
    repack: Repack | None = None

    def poll(self, timeout_s: float) -> list[Delta]:
        until = self.stage.world.now + self.poll_s
        while self.repack is not None and self.stage.world.now < until:
            self.repack.step(self.stage.world.now)
            self.stage.world.advance(min(1.0, until - self.stage.world.now))
        self.stage.world.advance(until - self.stage.world.now)
        return super().poll(timeout_s)


def slow_engine(stage: Stage, n_tokens: int) -> SlowEngine:
    engine = SlowEngine(always(ten(n_tokens)), max_running=8)
    engine.stage = stage
    return engine


def test_polls_longer_than_the_lease_cost_one_start_over_and_then_all_members_end(stage: Stage) -> None:
    engine = slow_engine(stage, 12)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    engine.repack = Repack(RepackConfig(dead_after_s=5.0, version_wait_s=1.0), stage.world.context("repack"))
    stage.prompts(1)
    stage.run(0.05, rollout, engine.repack)
    engine.poll_s = 8.0
    stage.until(lambda: len(stage.completed()) == 4, rollout, engine.repack, limit_s=600.0)
    assert len({s.incarnation for s in stage.read("rollouts.status", r.RolloutStatus)}) == 2
    assert stage.status().lease_s >= 3 * 8.0 * 0.9


def test_a_lease_that_slow_polls_made_long_becomes_short_again(stage: Stage) -> None:
    engine = slow_engine(stage, 3)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    stage.prompts(1)
    engine.poll_s = 4.0
    stage.until(lambda: len(stage.completed()) == 4, rollout, limit_s=60.0)
    stage.run(1.0, rollout)
    assert 11.0 < stage.status().lease_s <= 12.0
    stage.run(120.0, rollout, tick_s=0.2)
    assert stage.status().lease_s == 5.0


def test_a_younger_incarnation_takes_nothing_before_the_others_know_it(stage: Stage) -> None:
    class Watching(ScriptedEngine):
        known: set[int]

        def poll(self, timeout_s: float) -> list[Delta]:
            self.known = {s.incarnation for s in stage.read("rollouts.status", r.RolloutStatus)}
            return super().poll(timeout_s)

    engine = Watching(always(ten(3)), max_running=8)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    stage.run(0.2, rollout)
    stage.prompts(1)
    stage.world.advance(30.0)
    stage.until(lambda: engine.submitted != [], rollout)
    assert {s.incarnation for s in stage.read("trajectories.partial", r.TrajectoryStarted)} == {rollout.incarnation}
    assert rollout.incarnation in engine.known
