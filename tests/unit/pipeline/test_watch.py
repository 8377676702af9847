from __future__ import annotations

from pathlib import Path

from laminar.operators.operator import ModelConfig
from laminar.operators.rollout.config import RolloutConfig
from laminar.pipeline.config.models import RunConfig, SupervisorConfig
from laminar.pipeline.watch import RunWatch
from tests.support.dataflow import World, make_prompt


def test_a1_only_time_that_passes_counts_as_no_progress_not_a_wall_clock_that_is_set(tmp_path: Path) -> None:
    config = RunConfig(
        name="run",
        steps=1,
        groups_per_step=1,
        group_size=4,
        model=ModelConfig(path=tmp_path),
        operators={"rollout": RolloutConfig()},
        supervisor=SupervisorConfig(no_progress_timeout_s=100.0),
    )
    world, passed = World(), 5.0
    watch = RunWatch(config, world.log, clock=lambda: passed)
    watch.poll()
    assert watch.stalled(world.now + 3600.0) is None
    passed += 99.0
    world.write(make_prompt(0))
    watch.poll()
    passed += 99.0
    watch.poll()
    assert watch.stalled(world.now) is None
    passed += 1.0
    assert (watch.stalled(world.now - 3600.0) or "").startswith("no progress for 100 s: topic prompts has a lag of 1")
    watch.close()
