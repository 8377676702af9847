"""Whatever the loads, a repack plan conserves trajectories and keeps the limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.operators.repack.policy import Load, Orphan, place, plan


@st.composite
def loads(draw: st.DrawFn) -> list[Load]:
    made = []
    for index in range(draw(st.integers(0, 8))):
        max_running = draw(st.integers(1, 16))
        kv_max = draw(st.integers(1, 1000))
        made.append(
            Load(
                rollout_id=f"r{index}",
                incarnation=1,
                version=draw(st.integers(0, 2)),
                kv_used=draw(st.integers(0, kv_max)),
                kv_max=kv_max,
                running=draw(st.integers(0, max_running)),
                waiting=draw(st.sampled_from([0, 0, 0, 3])),
                max_running=max_running,
                in_flight=draw(st.sampled_from([False, False, True])),
            )
        )
    return made


@given(loads())
def test_a_plan_keeps_every_destination_within_its_limits_and_moves_each_source_once(given_loads: list[Load]) -> None:
    by_id = {load.rollout_id: load for load in given_loads}
    moves = plan(given_loads)
    sources = [m.source for m in moves]
    assert len(sources) == len(set(sources))
    assert not set(sources) & {m.destination for m in moves}
    kv = {load.rollout_id: load.kv_used for load in given_loads}
    running = {load.rollout_id: load.running for load in given_loads}
    for move in moves:
        source, destination = by_id[move.source], by_id[move.destination]
        assert source.version == destination.version
        assert not source.in_flight
        assert not destination.in_flight
        assert source.waiting == destination.waiting == 0
        assert source.running > 0
        kv[move.destination] += kv.pop(move.source)
        running[move.destination] += running.pop(move.source)
    assert sum(kv.values()) == sum(load.kv_used for load in given_loads)
    assert sum(running.values()) == sum(load.running for load in given_loads)
    for rollout in {m.destination for m in moves}:
        assert kv[rollout] <= by_id[rollout].kv_max
        assert running[rollout] <= by_id[rollout].max_running


@given(loads())
def test_after_a_plan_no_two_untouched_candidates_could_still_be_merged(given_loads: list[Load]) -> None:
    moves = plan(given_loads)
    touched = {m.source for m in moves} | {m.destination for m in moves}
    left = [
        load
        for load in given_loads
        if load.rollout_id not in touched
        and not load.in_flight
        and load.waiting == 0
        and 0 < load.running < load.max_running
        and load.kv_used < load.kv_max
    ]
    for a in left:
        for b in left:
            if a.rollout_id != b.rollout_id and a.version == b.version:
                assert a.kv_used + b.kv_used > b.kv_max or a.running + b.running > b.max_running


@given(loads(), st.lists(st.tuples(st.integers(-1, 2), st.floats(0, 20), st.integers(0, 2)), max_size=12))
def test_placing_orphans_mixes_no_versions_but_in_flight_and_never_waits_for_ever(
    given_loads: list[Load], drawn: list[tuple[int, float, int]]
) -> None:
    orphans = [Orphan(f"t{i}", version, 10, waited, refused) for i, (version, waited, refused) in enumerate(drawn)]
    placements = place(orphans, given_loads, version_wait_s=10.0)
    placed = {p.trajectory_id: p for p in placements}
    assert len(placed) == len(placements)
    by_id = {load.rollout_id: load for load in given_loads}
    for orphan in orphans:
        placement = placed.get(orphan.trajectory_id)
        if placement is None:
            assert not given_loads or (orphan.version >= 0 and orphan.waited_s < 10.0)
        elif placement.keep_tokens and orphan.version >= 0:
            target = by_id[placement.rollout_id]
            if target.in_flight:
                assert target.version >= orphan.version
            else:
                assert target.version == orphan.version or target.requests == 0
    kept: dict[str, set[int]] = {}
    for orphan in orphans:
        placement = placed.get(orphan.trajectory_id)
        if placement is not None and placement.keep_tokens and orphan.version >= 0:
            if by_id[placement.rollout_id].in_flight:
                continue
            kept.setdefault(placement.rollout_id, set()).add(orphan.version)
    assert all(len(versions) == 1 for versions in kept.values())
