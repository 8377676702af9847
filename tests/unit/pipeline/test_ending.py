from __future__ import annotations

from collections.abc import Iterator

import pytest

from laminar.pipeline.ending import EndWatch, RunLife
from laminar.schemas import records as r
from tests.support.dataflow import World


def started(epoch: int, step: int = 0) -> r.TrainerStarted:
    return r.TrainerStarted(run_id="run", epoch=epoch, step=step, version=step, at_ms=0)


def ended(epoch: int, step: int = 10, run_id: str = "run") -> r.RunEnded:
    return r.RunEnded(run_id=run_id, epoch=epoch, step=step, reason="all steps", at_ms=0)


def life(*records: object) -> RunLife:
    folded = RunLife("run")
    for offset, record in enumerate(records):
        folded.apply(offset, record)
    return folded


def test_a_run_ends_with_its_end_event() -> None:
    assert life(started(0)).ended is None
    assert life(started(0), ended(0)).ended == ended(0)


def test_a_newer_trainer_revokes_the_end() -> None:
    assert life(started(0), ended(0), started(1)).ended is None
    assert life(started(0), ended(0), started(1), ended(1)).ended == ended(1)


def test_the_end_of_a_fenced_trainer_does_not_count() -> None:
    assert life(started(1), ended(0)).ended is None


def test_the_end_of_another_run_does_not_count() -> None:
    assert life(started(0), ended(0, run_id="other")).ended is None


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.log.close()


def watch(world: World, began_at: int | None) -> EndWatch:
    return EndWatch(world.log, world.codec, "run", began_at=began_at, grace_s=60.0)


def test_a_resumed_run_is_not_stopped_by_the_end_that_it_found(world: World) -> None:
    world.write(started(0), ended(0))
    resumed = watch(world, began_at=2)
    for now in (0.0, 1000.0, 1_000_000.0):
        assert resumed.poll(now) is None
    world.write(started(1, step=10))
    assert resumed.poll(0.0) is None
    world.write(ended(1, step=20))
    assert resumed.poll(0.0) == ended(1, step=20)
    resumed.close()


def test_a_process_restarted_after_the_end_of_a_supervised_run_sees_it(world: World) -> None:
    world.write(started(0), ended(0))
    late = watch(world, began_at=0)
    assert late.poll(0.0) == ended(0)
    late.close()


def test_an_operator_started_alone_after_the_end_waits_for_a_resume_and_then_leaves(world: World) -> None:
    world.write(started(0), ended(0))
    alone = watch(world, began_at=None)
    assert alone.poll(100.0) is None
    assert alone.poll(159.0) is None
    assert alone.poll(160.0) == ended(0)
    alone.close()


def test_an_operator_started_alone_goes_on_when_a_trainer_resumes_within_the_grace(world: World) -> None:
    world.write(started(0), ended(0))
    alone = watch(world, began_at=None)
    assert alone.poll(100.0) is None
    world.write(started(1, step=10))
    assert alone.poll(161.0) is None
    world.write(ended(1, step=20))
    assert alone.poll(161.0) == ended(1, step=20)
    alone.close()


def test_an_operator_started_alone_obeys_an_end_that_comes_later_at_once(world: World) -> None:
    world.write(started(0))
    alone = watch(world, began_at=None)
    assert alone.poll(0.0) is None
    world.write(ended(0))
    assert alone.poll(0.0) == ended(0)
    alone.close()
