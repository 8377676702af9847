"""The traps of Algorithm 1, one by one."""

from __future__ import annotations

from laminar.operators.repack.policy import Load, Move, Orphan, Placement, place, plan


def load(name: str, kv: int, running: int, **changes: int) -> Load:
    values = {"version": 1, "kv_max": 100, "waiting": 0, "max_running": 8, **changes}
    return Load(rollout_id=name, incarnation=1, kv_used=kv, running=running, **values)


def test_the_emptiest_moves_to_the_fullest_that_fits() -> None:
    assert plan([load("a", 10, 1), load("b", 60, 2), load("c", 95, 3)]) == (Move("a", "b"),)


def test_a_straggler_whose_kv_grows_is_still_a_candidate() -> None:
    # Only "nothing waits" counts, so one long trajectory is moved although its KV use rose since the last status.
    assert plan([load("a", 50, 1), load("b", 49, 1)]) == (Move("b", "a"),)


def test_a_rollout_with_waiting_requests_takes_no_part() -> None:
    assert plan([load("a", 10, 1), load("b", 20, 2, waiting=1)]) == ()


def test_other_versions_are_never_mixed() -> None:
    assert plan([load("a", 10, 1), load("b", 20, 2, version=2)]) == ()


def test_a_destination_is_not_emptied_later_in_the_same_plan() -> None:
    moves = plan([load("a", 10, 1), load("b", 20, 1), load("c", 70, 1)])
    assert {m.source for m in moves}.isdisjoint({m.destination for m in moves})


def test_the_batch_limit_protects_the_tail() -> None:
    assert plan([load("a", 1, 3), load("b", 2, 6)]) == ()


def test_busy_rollouts_are_left_alone() -> None:
    assert plan([load("a", 10, 1), load("b", 20, 2)], busy={"b"}) == ()


def test_an_orphan_goes_to_a_rollout_of_its_version() -> None:
    loads = [load("a", 0, 0, version=2), load("b", 50, 7, version=1)]
    assert place([Orphan("t", 1, 9, 0.0, 0)], loads, version_wait_s=10) == (Placement("t", "b", True),)


def test_an_idle_rollout_takes_an_orphan_of_another_version_and_all_others_of_it() -> None:
    loads = [load("a", 0, 0, version=2), load("b", 50, 7, version=3)]
    orphans = [Orphan("t", 1, 9, 0.0, 0), Orphan("u", 1, 8, 0.0, 0)]
    assert {p.rollout_id for p in place(orphans, loads, version_wait_s=10)} == {"a"}


def test_an_orphan_whose_version_is_gone_waits_and_is_then_sampled_anew() -> None:
    loads = [load("b", 50, 7, version=3)]
    assert place([Orphan("t", 1, 9, 9.0, 0)], loads, version_wait_s=10) == ()
    assert place([Orphan("t", 1, 9, 10.0, 0)], loads, version_wait_s=10) == (Placement("t", "b", False),)


def test_an_orphan_without_tokens_goes_anywhere_at_once() -> None:
    loads = [load("a", 50, 7, version=3), load("b", 50, 1, version=4)]
    assert place([Orphan("t", -1, 4, 0.0, 0)], loads, version_wait_s=10) == (Placement("t", "b", True),)


def test_an_orphan_that_is_handed_back_time_and_again_is_sampled_anew() -> None:
    # Its owners died with it near their limit, and the others are smaller: it must not wander for ever.
    loads = [load("a", 50, 7, version=1), load("b", 50, 1, version=1)]
    assert place([Orphan("t", 1, 900, 0.0, 2)], loads, version_wait_s=10) == (Placement("t", "b", True),)
    assert place([Orphan("t", 1, 900, 0.0, 3)], loads, version_wait_s=10) == (Placement("t", "b", False),)


def test_rollouts_whose_weights_change_in_flight_are_not_emptied() -> None:
    loads = [load("a", 10, 1, in_flight=True), load("b", 20, 2, in_flight=True), load("c", 30, 1)]
    assert plan(loads) == ()
    assert plan([*loads, load("d", 40, 1)]) == (Move("c", "d"),)


def test_an_orphan_goes_on_in_flight_with_its_version_or_a_newer_one_and_waits_for_no_idle_one_behind() -> None:
    busy = [load("a", 50, 7, version=3, in_flight=True), load("b", 50, 6, version=1, in_flight=True)]
    behind = load("c", 0, 0, version=0, in_flight=True)
    assert place([Orphan("t", 1, 9, 0.0, 0)], [*busy, behind], version_wait_s=10) == (Placement("t", "b", True),)
    assert place([Orphan("t", 2, 9, 0.0, 0)], [*busy, behind], version_wait_s=10) == (Placement("t", "a", True),)
    assert place([Orphan("t", 4, 9, 9.0, 0)], [*busy, behind], version_wait_s=10) == ()
    assert place([Orphan("t", 4, 9, 10.0, 0)], [*busy, behind], version_wait_s=10) == (Placement("t", "c", False),)


def test_orphans_of_several_versions_go_on_in_flight_on_the_same_rollout() -> None:
    orphans = [Orphan("t", 1, 9, 0.0, 0), Orphan("u", 2, 8, 0.0, 0)]
    placed = place(orphans, [load("a", 50, 3, version=3, in_flight=True)], version_wait_s=10)
    assert placed == (Placement("t", "a", True), Placement("u", "a", True))
