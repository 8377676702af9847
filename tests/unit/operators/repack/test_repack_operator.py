"""Repack over the memory log: it folds the pool, adopts what the dead leave, empties the tail."""

from __future__ import annotations

import dataclasses

import pytest

from laminar.operators.repack import operator as repack
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout import event
from laminar.operators.rollout.ledger import Owned
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted
from laminar.streams.log import OutRecord
from laminar.streams.memory import MemoryLog, NoFaults, Point
from tests.support.dataflow import World, make_prompt, make_tokens
from tests.support.faults import Crash
from tests.support.late_log import LateLog


class Stall(NoFaults):
    """Its producer dies inside its transaction."""

    def at(self, point: Point, transactional_id: str) -> None:
        if point == "inside_commit":
            raise Crash


class Refuse(NoFaults):
    """The broker aborts the next transaction."""

    once = False

    def at(self, point: Point, transactional_id: str) -> None:
        if self.once:
            self.once = False
            raise Aborted("no")


CONFIG = RepackConfig(period_s=1.0, dead_after_s=3.0, version_wait_s=2.0)


def heartbeat(world: World, rollout: str, ids: tuple[str, ...] = (), **changes: object) -> r.RolloutStatus:
    values: dict[str, object] = {
        "rollout_id": rollout,
        "incarnation": 1,
        "state": "sampling" if ids else "idle",
        "version": 7,
        "kv_used": 10 * len(ids),
        "kv_total": 1000,
        "running": len(ids),
        "waiting": 0,
        "preempted": 0,
        "max_running": 8,
        "tokens_per_s": 0.0,
        "in_flight": tuple(r.InFlight(trajectory_id=i, attempt=0, n_tokens=10) for i in ids),
        "at_ms": world.now_ms,
    }
    return r.RolloutStatus(**{**values, **changes})  # type: ignore[arg-type]


def started(world: World, member: int, rollout: str, incarnation: int = 1) -> r.TrajectoryStarted:
    prompt = make_prompt()
    return r.TrajectoryStarted(
        trajectory_id=r.trajectory_id(prompt.prompt_id, member),
        attempt=0,
        member=member,
        prompt=prompt,
        rollout_id=rollout,
        incarnation=incarnation,
        version=7,
        engine="scripted",
        seed=member,
        at_ms=world.now_ms,
    )


def delta(world: World, trajectory: str, start: int, n: int, attempt: int = 0) -> r.TrajectoryTokens:
    return r.TrajectoryTokens(
        trajectory_id=trajectory,
        attempt=attempt,
        start=start,
        tokens=make_tokens(n, 7, first=5 + start),
        at_ms=world.now_ms,
    )


def run(
    world: World, operator: Repack, seconds: float, beats: dict[str, tuple[str, ...]], *, step: bool = True
) -> None:
    """Let time pass while the rollouts named in ``beats`` go on sending heartbeats."""
    until = world.now + seconds
    while world.now < until:
        world.write(*(heartbeat(world, rollout, ids) for rollout, ids in beats.items()))
        while step and operator.step(world.now):
            pass
        world.advance(0.25)


def test_a5_trajectories_of_a_rollout_that_never_answers_are_adopted_with_all_their_tokens() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), started(world, 1, "r0"), delta(world, "d/0/0/0", 0, 3))
    world.write(heartbeat(world, "r0", ("d/0/0/0", "d/0/0/1")), heartbeat(world, "r1"))
    run(world, operator, 2.0, {"r1": ()})
    assert world.read("rollouts.commands", r.AdoptCommand) == []
    world.write(delta(world, "d/0/0/0", 3, 2))
    run(world, operator, 3.0, {"r1": ()})
    adopted = {a.snapshot.trajectory_id: a for a in world.read("rollouts.commands", r.AdoptCommand)}
    assert set(adopted) == {"d/0/0/0", "d/0/0/1"}
    assert all(a.rollout_id == "r1" and a.snapshot.attempt == 2 for a in adopted.values())
    assert adopted["d/0/0/0"].snapshot.response.ids_T.tolist() == [5, 6, 7, 8, 9]
    assert adopted["d/0/0/0"].snapshot.version == 7
    assert {m.trajectory_id for m in world.read("trajectories.partial", r.TrajectoryMoved)} == set(adopted)


def test_b12_what_a_slow_owner_gives_away_after_repack_took_it_is_of_an_older_attempt() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), heartbeat(world, "r0", ("d/0/0/0",)), heartbeat(world, "r1"))
    run(world, operator, 5.0, {"r1": ()})
    (taken,) = world.read("rollouts.commands", r.AdoptCommand)
    owned = Owned.started(make_prompt(0), at_ms=0)[0]
    given = event.moved(
        owned, reason="repack", from_rollout="r0", to_rollout="r2", to_incarnation=1, at_ms=world.now_ms
    )
    assert given.attempt < taken.snapshot.attempt


def test_s5_a_restarted_repack_does_not_decide_again_what_an_open_transaction_hides() -> None:
    world = World()
    assert isinstance(world.log, MemoryLog)
    operator = Repack(CONFIG, world.context("repack"))
    world.write(
        started(world, 0, "r0"), heartbeat(world, "r0", ("d/0/0/0",)), heartbeat(world, "r1"), heartbeat(world, "r2")
    )
    run(world, operator, 1.0, {"r1": (), "r2": ()})
    stalled = MemoryLog(broker=world.log.broker, faults=Stall()).producer("stalled")
    every = range(world.log.topics()["trajectories.partial"].partitions)

    def stall() -> None:
        with stalled.transaction() as tx:
            for partition in every:
                tx.send(OutRecord(topic="trajectories.partial", key=b"x", value=None, partition=partition))

    with pytest.raises(Crash):
        stall()
    run(world, operator, 4.0, {"r1": (), "r2": ()})
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1
    operator.close()
    again = Repack(CONFIG, world.context("repack"))
    run(world, again, 6.0, {"r1": ("x",), "r2": ()})
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1
    world.log.producer("stalled")
    run(world, again, 1.0, {"r1": (), "r2": ()})
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1
    assert again._caught_up


def test_a_refused_transaction_does_not_make_repack_wait_for_a_decision_that_it_has_read() -> None:
    world = World()
    assert isinstance(world.log, MemoryLog)
    refusing = Refuse()
    context = world.context("repack")
    log = MemoryLog(broker=world.log.broker, faults=refusing)
    operator = Repack(CONFIG, dataclasses.replace(context, log=log))
    world.write(started(world, 0, "r0"), heartbeat(world, "r0", ("d/0/0/0",)), heartbeat(world, "r1"))
    run(world, operator, 4.0, {"r1": ()})
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1
    refusing.once = True
    run(world, operator, 6.0, {"r1": ()})
    assert not refusing.once
    assert operator._caught_up


def test_a_rollout_that_announced_a_longer_lease_is_dead_after_that() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), heartbeat(world, "r0", ("d/0/0/0",), lease_s=9.0), heartbeat(world, "r1"))
    run(world, operator, 8.5, {"r1": ()})
    assert world.read("rollouts.commands", r.AdoptCommand) == []
    run(world, operator, 1.0, {"r1": ()})
    assert [a.rollout_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["r1"]


def test_a_younger_incarnation_means_the_old_owner_is_dead_at_once() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0", incarnation=1), heartbeat(world, "r0", incarnation=2))
    for _ in range(6):
        operator.step(world.now)
    adopted = world.read("rollouts.commands", r.AdoptCommand)
    assert [(a.rollout_id, a.incarnation) for a in adopted] == [("r0", 2)]


def test_b13_finished_members_of_a_group_are_not_adopted() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(*(started(world, m, "r0") for m in range(4)))
    world.write(
        *(
            r.TrajectoryEnded(trajectory_id=f"d/0/0/{m}", attempt=0, finish="stop", n_tokens=1, at_ms=world.now_ms)
            for m in range(3)
        )
    )
    run(world, operator, 5.0, {"r1": ()})
    assert [a.snapshot.trajectory_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["d/0/0/3"]


def test_b12_deltas_and_ends_of_an_older_attempt_are_ignored_and_counted() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"))
    run(world, operator, 4.0, {"r1": ()})
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1
    world.write(delta(world, "d/0/0/0", 0, 4))
    world.write(r.TrajectoryEnded(trajectory_id="d/0/0/0", attempt=0, finish="stop", n_tokens=4, at_ms=0))
    run(world, operator, 4.0, {})  # r1 dies as well
    run(world, operator, 1.0, {"r2": ()})
    last = world.read("rollouts.commands", r.AdoptCommand)[-1]
    assert (last.rollout_id, last.snapshot.attempt, last.snapshot.response.n_tokens) == ("r2", 4, 0)


def test_the_tail_is_released_on_to_the_fuller_rollout() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), started(world, 1, "r1"), started(world, 2, "r1"))
    run(world, operator, 1.0, {"r0": ("d/0/0/0",), "r1": ("d/0/0/1", "d/0/0/2")})
    releases = world.read("rollouts.commands", r.ReleaseCommand)
    assert [(c.rollout_id, c.to_rollout, c.trajectory_ids) for c in releases] == [("r0", "r1", ("d/0/0/0",))]


def test_a_restarted_repack_folds_only_what_is_in_flight() -> None:
    world = World()
    first = Repack(CONFIG, world.context("repack"))
    for index in range(50):
        prompt = make_prompt(index)
        begun = started(world, 0, "r0")
        trajectory = r.trajectory_id(prompt.prompt_id, 0)
        world.write(
            r.TrajectoryStarted(
                trajectory_id=trajectory,
                attempt=0,
                member=0,
                prompt=prompt,
                rollout_id=begun.rollout_id,
                incarnation=1,
                version=7,
                engine="scripted",
                seed=0,
                at_ms=world.now_ms,
            ),
            *(
                [r.TrajectoryEnded(trajectory_id=trajectory, attempt=0, finish="stop", n_tokens=0, at_ms=0)]
                if index < 49
                else []
            ),
        )
    run(world, first, 8.0, {"r0": ("d/0/49/0",)})
    first.close()
    committed = world.log.committed("run.repack.fold", "trajectories.partial")
    ends = {p: world.log.reader().bounds(p).end for p in committed}
    assert sum(ends[p] - committed[p] for p in committed) == 1
    second = Repack(CONFIG, world.context("repack"))
    run(world, second, 4.0, {"r1": ()})
    assert [a.snapshot.trajectory_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["d/0/49/0"]


def test_only_one_of_two_instances_decides() -> None:
    world = World()
    context = world.context("repack")
    first = Repack(CONFIG, context)
    second = Repack(CONFIG, dataclasses.replace(context, instance="repack-1"))
    world.write(started(world, 0, "r0"))
    until = world.now + 6.0
    while world.now < until:
        world.write(heartbeat(world, "r1"))
        first.step(world.now)
        second.step(world.now)
        world.advance(0.25)
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 1


def test_an_adoption_that_was_committed_after_all_is_not_repeated() -> None:
    world = World()
    context = dataclasses.replace(world.context("repack"), log=LateLog(world.log))  # type: ignore[arg-type]
    operator = Repack(CONFIG, context)
    world.write(started(world, 0, "r0"))
    run(world, operator, 6.0, {"r1": (), "r2": ()})
    adopted = world.read("rollouts.commands", r.AdoptCommand)
    assert [a.snapshot.attempt for a in adopted] == [2]


def test_many_large_orphans_are_adopted_in_several_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "_BATCH_BYTES", 1)
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(*(started(world, member, "r0") for member in range(3)))
    run(world, operator, 5.0, {"r1": ()})
    adopted = world.read("rollouts.commands", r.AdoptCommand)
    assert sorted(a.snapshot.member for a in adopted) == [0, 1, 2]
    assert len({a.at_ms for a in adopted}) == 3


def test_a_run_that_is_resumed_after_heartbeats_have_expired_goes_on() -> None:
    world = World()
    assert isinstance(world.log, MemoryLog)
    first = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"))
    run(world, first, 8.0, {"r0": ("d/0/0/0",)})
    first.close()
    run(world, first, 1.0, {"r0": ()}, step=False)
    world.advance(2 * 24 * 3600)
    world.write(heartbeat(world, "r1"))
    world.log.maintain(world.now)
    second = Repack(CONFIG, world.context("repack"))
    run(world, second, 5.0, {"r1": ()})
    assert [a.rollout_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["r1"]


def test_orphans_are_placed_by_what_heartbeats_say_of_updates() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), delta(world, "d/0/0/0", 0, 3), heartbeat(world, "r0", ("d/0/0/0",)))
    until = world.now + 6.0
    while world.now < until:
        world.write(
            heartbeat(world, "pinned", ("d/0/9/0",), version=9),
            heartbeat(world, "flying", ("d/0/9/1", "d/0/9/2"), version=9, updates="in_flight"),
        )
        while operator.step(world.now):
            pass
        world.advance(0.25)
    [adopted] = world.read("rollouts.commands", r.AdoptCommand)
    assert (adopted.rollout_id, adopted.snapshot.version, adopted.snapshot.response.n_tokens) == ("flying", 7, 3)


def test_a_rollout_whose_engine_is_away_gets_nothing_and_what_it_gave_up_goes_on_elsewhere_at_once() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    names = [f"d/0/0/{member}" for member in range(4)]
    world.write(*(started(world, member, "r0" if member < 2 else "r1") for member in range(4)))
    world.write(delta(world, names[0], 0, 3), heartbeat(world, "r0", tuple(names[:2])))
    world.write(heartbeat(world, "r1", tuple(names[2:])))
    while operator.step(world.now):
        pass
    lost = [
        r.TrajectoryMoved(
            trajectory_id=name, attempt=1, reason="lost", from_rollout="r0", to_rollout="r0", to_incarnation=0,
            n_tokens=n, at_ms=world.now_ms,
        )
        for name, n in zip(names[:2], (3, 0), strict=True)
    ]  # fmt: skip
    world.write(*lost)
    planned = world.read("rollouts.commands", r.ReleaseCommand)
    until = world.now + 8.0
    while world.now < until:
        world.write(
            heartbeat(world, "r0", state="starting", version=-1, engine_losses=1),
            heartbeat(world, "r1", tuple(names[2:])),
        )
        while operator.step(world.now):
            pass
        world.advance(0.25)
        adopted = {a.snapshot.trajectory_id: a for a in world.read("rollouts.commands", r.AdoptCommand)}
        assert world.now < until - 6.0 or adopted.keys() == set(names[:2]), "they wait"
    assert {(a.rollout_id, a.snapshot.attempt) for a in adopted.values()} == {("r1", 3)}
    assert adopted[names[0]].snapshot.response.n_tokens == 3
    assert world.read("rollouts.commands", r.ReleaseCommand) == planned
