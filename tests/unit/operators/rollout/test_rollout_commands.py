"""Release, Adopt and Drain; heartbeats; stopping; a process that slept too long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted
from tests.support.dataflow import make_prompt, make_tokens
from tests.unit.operators.rollout.stage import FailingCommits, Stage, ten

FIRST = "d/0/0/0"
LONG = r.Sampling(max_tokens=1000)


def release(stage: Stage, source: Rollout, to: Rollout, *ids: str, **changes: Any) -> None:
    command = r.ReleaseCommand(
        rollout_id="rollout-0",
        incarnation=source.incarnation,
        trajectory_ids=ids,
        to_rollout="rollout-1",
        to_incarnation=to.incarnation,
        at_ms=stage.world.now_ms,
    )
    stage.world.write(replace(command, **changes))


def adoption(stage: Stage, to: Rollout, **changes: Any) -> r.AdoptCommand:
    prompt = changes.pop("prompt", None) or make_prompt(50, group_size=1, sampling=LONG)
    snapshot = r.Snapshot(
        trajectory_id=r.trajectory_id(prompt.prompt_id, 0),
        attempt=changes.pop("attempt", 1),
        member=0,
        prompt=prompt,
        response=make_tokens(changes.pop("n", 5), 0, first=100),
        version=0,
        seed=1,
        timings=r.Timings(started_ms=77, first_token_ms=88, moves=1),
    )
    command = r.AdoptCommand(
        rollout_id="rollout-0",
        incarnation=to.incarnation,
        reason="repack",
        from_rollout="rollout-9",
        snapshot=snapshot,
        at_ms=stage.world.now_ms,
    )
    return replace(command, **changes)


def pair(stage: Stage, n: int = 60, **config: Any) -> tuple[Rollout, Rollout]:
    """Two rollouts; the first one samples group 0."""
    source = stage.rollout(0, engine=ScriptedEngine(always(ten(n)), max_running=8), **config)
    stage.prompts(1, sampling=LONG)
    stage.run(0.2, source)
    to = stage.rollout(1, engine=ScriptedEngine(always(ten(n)), max_running=8))
    stage.run(0.05, source, to)
    return source, to


def test_a_released_trajectory_goes_on_elsewhere_with_the_same_tokens(stage: Stage) -> None:
    source, to = pair(stage)
    release(stage, source, to, FIRST, "d/0/0/2", "d/7/7/7")
    stage.until(lambda: len(stage.completed()) == 4, source, to)
    for name in (FIRST, "d/0/0/2"):
        one = stage.completed()[name]
        assert (one.rollout_id, one.attempt, one.timings.moves) == ("rollout-1", 1, 1)
        assert one.response.ids_T.tolist() == list(range(100, 160))
        [moved] = [e for e in stage.partial(name) if isinstance(e, r.TrajectoryMoved)]
        assert (moved.reason, moved.attempt, moved.to_rollout) == ("repack", 1, "rollout-1")
        before = sum(e.tokens.n_tokens for e in stage.partial(name) if getattr(e, "tokens", None) and e.attempt == 0)
        assert moved.n_tokens == before > 0
    assert stage.completed()["d/0/0/1"].rollout_id == "rollout-0"


def test_a_release_is_one_transaction_also_when_it_aborts_first(stage: Stage) -> None:
    faults = FailingCommits()
    source, to = pair(stage, faults=faults)
    release(stage, source, to, FIRST)
    faults.next(Aborted, times=3)
    for _ in range(6):
        source.step(stage.world.now)
        moves = stage.read("trajectories.partial", r.TrajectoryMoved)
        adopts = stage.read("rollouts.commands", r.AdoptCommand)
        assert [m.trajectory_id for m in moves] == [a.snapshot.trajectory_id for a in adopts]
        stage.world.advance(0.01)
    assert len(moves) == 1
    stage.until(lambda: len(stage.completed()) == 4, source, to)


def test_a_rollout_that_was_emptied_loads_the_newest_version_at_once(stage: Stage) -> None:
    source, to = pair(stage, n=300)
    stage.publish(1)
    stage.run(0.05, source, to)
    assert stage.status(0).version == 0
    release(stage, source, to, *(f"d/0/0/{m}" for m in range(4)))
    stage.run(0.1, source, to)
    assert stage.status(0).version == 1
    stage.prompts(2, first=1)
    stage.until(lambda: len(stage.completed()) == 12, source, to)


def test_a_release_to_itself_changes_nothing(stage: Stage) -> None:
    source, to = pair(stage)
    release(stage, source, to, FIRST, to_rollout="rollout-0", to_incarnation=source.incarnation)
    stage.until(lambda: len(stage.completed()) == 4, source)
    assert stage.read("trajectories.partial", r.TrajectoryMoved) == []


def test_commands_for_another_incarnation_are_ignored(stage: Stage) -> None:
    source, to = pair(stage)
    release(stage, source, to, FIRST, incarnation=source.incarnation - 1)
    stage.world.write(adoption(stage, source, incarnation=source.incarnation + 1))
    stage.until(lambda: len(stage.completed()) == 4, source, to)
    stage.run(0.5, source, to)
    assert stage.read("trajectories.partial", r.TrajectoryMoved) == []
    assert len(stage.completed()) == 4


def test_commands_from_before_the_start_are_not_read(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(20)))
    probe = stage.rollout()
    stage.world.write(adoption(stage, probe))
    late = stage.rollout(engine=engine)
    late.incarnation = probe.incarnation
    stage.run(0.5, late)
    assert engine.submitted == []


def test_an_adopted_trajectory_keeps_its_attempt_seed_and_times(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(20)))
    rollout = stage.rollout(engine=engine)
    stage.run(0.1, rollout)
    stage.world.write(adoption(stage, rollout, attempt=3))
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    [one] = stage.completed().values()
    assert (one.attempt, one.seed) == (3, 1)
    assert (one.timings.started_ms, one.timings.first_token_ms, one.timings.moves) == (77, 88, 1)
    assert engine.submitted[0].sampled.n_tokens == 5


@pytest.mark.parametrize("attempts", [(1, 1), (2, 1), (2, 2)])
def test_a_second_adopt_of_the_same_or_an_older_attempt_is_ignored(stage: Stage, attempts: tuple[int, int]) -> None:
    engine = ScriptedEngine(always(ten(20)))
    rollout = stage.rollout(engine=engine)
    stage.run(0.1, rollout)
    for attempt in attempts:
        stage.world.write(adoption(stage, rollout, attempt=attempt))
        stage.run(0.05, rollout)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    stage.world.write(adoption(stage, rollout, attempt=attempts[0]))
    stage.run(0.5, rollout)
    assert len(engine.submitted) == 1
    assert [one.attempt for one in stage.completed().values()] == [attempts[0]]


def test_a_newer_attempt_replaces_the_one_in_hand(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(60)))
    rollout = stage.rollout(engine=engine)
    stage.run(0.1, rollout)
    stage.world.write(adoption(stage, rollout, attempt=1))
    stage.run(0.1, rollout)
    stage.world.write(adoption(stage, rollout, attempt=3, n=2))
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    [one] = stage.completed().values()
    assert one.attempt == 3
    assert one.response.ids_T.tolist() == list(range(100, 160))
    assert [request.sampled.n_tokens for request in engine.submitted] == [5, 2]


def test_a_trajectory_that_was_given_away_may_come_back(stage: Stage) -> None:
    source, to = pair(stage, n=200)
    release(stage, source, to, FIRST)
    stage.run(0.3, source, to)
    release(
        stage,
        to,
        source,
        FIRST,
        rollout_id="rollout-1",
        incarnation=to.incarnation,
        to_rollout="rollout-0",
        to_incarnation=source.incarnation,
    )
    stage.until(lambda: len(stage.completed()) == 4, source, to)
    one = stage.completed()[FIRST]
    assert (one.rollout_id, one.attempt, one.timings.moves) == ("rollout-0", 2, 2)
    assert one.response.ids_T.tolist() == list(range(100, 300))


@pytest.mark.parametrize(
    ("limits", "reason", "kept"),
    [
        ({"max_running": 1}, "repack", False),  # the batch is full
        ({"kv_total": 12}, "repack", False),  # the cache is full
        ({"max_running": 1}, "dead", True),  # an orphan queues instead
        ({"max_model_len": 9}, "dead", False),  # it can never fit
    ],
)
def test_what_does_not_fit_is_handed_back_to_the_pool(
    stage: Stage, limits: dict[str, int], reason: r.MoveReason, kept: bool
) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(20)), **limits))
    stage.prompts(1, group_size=1, sampling=LONG)
    stage.run(0.02, rollout)
    stage.world.write(adoption(stage, rollout, reason=reason))
    stage.until(lambda: len(stage.completed()) == 1 + kept, rollout)
    moved = stage.read("trajectories.partial", r.TrajectoryMoved)
    if kept:
        assert moved == []
        return
    [one] = moved
    assert (one.reason, one.attempt, one.to_rollout, one.to_incarnation) == ("handback", 2, "rollout-9", 0)
    assert one.n_tokens == 5


def test_a_drain_command_ends_the_taking_and_lets_the_rest_finish(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(30)), max_running=8))
    stage.prompts(1)
    stage.run(0.05, rollout)
    stage.world.write(r.DrainCommand(rollout_id="rollout-0", incarnation=rollout.incarnation, at_ms=stage.world.now_ms))
    stage.run(0.02, rollout)
    stage.prompts(3, first=1)
    stage.world.write(adoption(stage, rollout, reason="dead"))
    stage.run(1.0, rollout)
    assert len(stage.completed()) == 4
    assert stage.status().state == "draining"
    assert stage.status().in_flight == ()
    [handed_back] = stage.read("trajectories.partial", r.TrajectoryMoved)
    assert handed_back.reason == "handback"


def test_a7_b18_a_stopped_rollout_leaves_its_trajectories_in_the_pool_with_every_token(stage: Stage) -> None:
    faults = FailingCommits()
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(200)), max_running=8), delta_s=1000.0, faults=faults)
    stage.prompts(2, sampling=LONG)
    stage.run(0.5, rollout)
    sampled = {i.trajectory_id: i.n_tokens - 4 for i in stage.status().in_flight}
    faults.next(Aborted)
    assert not rollout.drain(stage.world.now)
    assert rollout.drain(stage.world.now)
    rollout.close()
    assert len(sampled) == 8
    for name, n_seen in sampled.items():
        *_, delta, moved = stage.partial(name)
        assert (moved.reason, moved.to_incarnation, moved.attempt) == ("drain", 0, 1)
        assert delta.start + delta.tokens.n_tokens == moved.n_tokens >= n_seen
        assert moved.n_tokens >= 45
    assert (stage.status().state, stage.status().in_flight) == ("draining", ())
    assert stage.completed() == {}


def test_what_finished_between_the_last_poll_and_the_stop_is_completed(stage: Stage) -> None:
    world = stage.world
    engine = ScriptedEngine(always(ten(20)), tokens_per_s=100.0, clock=lambda: world.now)
    rollout = stage.rollout(engine=engine)
    stage.prompts(1)
    stage.run(0.1, rollout)
    world.advance(1.0)  # all four end now, unseen
    assert rollout.drain(world.now)
    assert len(stage.completed()) == 4
    assert stage.read("trajectories.partial", r.TrajectoryMoved) == []


def test_heartbeats_come_each_period_and_at_once_after_a_change(stage: Stage) -> None:
    rollout = stage.rollout(heartbeat_s=1.0, engine=ScriptedEngine(always(ten(300)), max_running=2))
    stage.run(0.12, rollout)
    assert [s.state for s in stage.read("rollouts.status", r.RolloutStatus)][-1] == "idle"
    stage.prompts(1, sampling=LONG)
    stage.run(0.1, rollout)
    status = stage.status()
    assert (status.state, status.version, status.running, status.waiting) == ("sampling", 0, 2, 2)
    assert (status.max_running, status.kv_total) == (2, 65536)
    assert len(status.in_flight) == 4
    before = len(stage.read("rollouts.status", r.RolloutStatus))
    stage.run(2.0, rollout)
    assert 2 <= len(stage.read("rollouts.status", r.RolloutStatus)) - before <= 3
    assert 150 <= stage.status().tokens_per_s <= 250
    # Ramp-down: the first two end after 3 s, and then nothing waits any more.
    stage.until(lambda: len(stage.completed()) == 2, rollout)
    stage.run(0.1, rollout)
    assert (stage.status().running, stage.status().waiting) == (2, 0)


def test_a_process_that_slept_past_its_lease_gives_up_what_others_own_by_then(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(100)), max_running=8)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    stage.prompts(1, sampling=LONG)
    stage.run(0.2, rollout)
    before = rollout.incarnation
    stage.world.advance(30.0)
    stage.run(0.2, rollout)
    assert rollout.incarnation > before
    assert stage.status().incarnation == rollout.incarnation
    assert stage.status().in_flight == ()
    assert engine.stats().running == 0
    stage.run(3.0, rollout)
    assert stage.completed() == {}
    assert stage.read("trajectories.partial", r.TrajectoryMoved) == []


def test_a_process_that_slept_with_empty_hands_ignores_what_it_was_given_meanwhile(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(20)), max_running=8)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    stage.run(0.2, rollout)
    stage.world.write(adoption(stage, rollout, reason="dead"))
    stage.world.advance(30.0)  # by now repack has given it to somebody else
    stage.run(1.0, rollout)
    assert engine.submitted == []


def test_a_process_that_slept_inside_a_step_writes_nothing_of_what_it_gave_up(stage: Stage) -> None:
    class Sleeper(ScriptedEngine):
        asleep_s = 0.0

        def poll(self, timeout_s: float) -> list[Delta]:
            stage.world.advance(self.asleep_s)
            return super().poll(timeout_s)

    engine = Sleeper(always(ten(100)), max_running=8)
    rollout = stage.rollout(engine=engine, lease_s=5.0)
    stage.prompts(1, sampling=LONG)
    stage.run(0.3, rollout)
    before = len(stage.read("trajectories.partial", object))
    now = stage.world.now
    engine.asleep_s = 30.0
    rollout.step(now)
    engine.asleep_s = 0.0
    stage.run(3.0, rollout)
    assert len(stage.read("trajectories.partial", object)) == before
    assert stage.status().incarnation == rollout.incarnation > int(now * 1000)
