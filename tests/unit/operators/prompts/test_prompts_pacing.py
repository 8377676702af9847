"""Admission never stalls and never lets a group become staler than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.operators.prompts.pacing import Load, allowance


def fresh() -> Load:
    return Load(outstanding=0, steps=0, oldest_step=None, newest_step=0)


@given(st.integers(1, 64), st.integers(0, 128), st.none() | st.integers(0, 4))
def test_a13_every_valid_combination_admits_at_least_one_step_at_the_start(
    groups_per_step: int, extra: int, max_staleness: int | None
) -> None:
    allowed = allowance(
        fresh(),
        max_outstanding=groups_per_step + extra,
        groups_per_step=groups_per_step,
        total_steps=1000,
        max_staleness=max_staleness,
    )
    assert allowed >= groups_per_step


@given(st.data(), st.integers(1, 6), st.integers(0, 12), st.integers(0, 3))
def test_a12_training_goes_on_and_a_straggler_is_trained_within_the_bound(
    data: st.DataObject, groups_per_step: int, extra: int, max_staleness: int
) -> None:
    # Groups finish in any order, chosen by hypothesis; the trainer takes any finished groups as soon as it has enough.
    max_outstanding = groups_per_step + extra
    steps, published, admitted = 0, 0, 0
    outstanding: dict[int, int] = {}
    finished: list[int] = []
    straggler = data.draw(st.integers(0, 10), label="straggler")
    for _ in range(60):
        load = Load(
            outstanding=len(outstanding),
            steps=steps,
            oldest_step=min(outstanding.values(), default=None),
            newest_step=published,
        )
        for _ in range(
            allowance(
                load,
                max_outstanding=max_outstanding,
                groups_per_step=groups_per_step,
                total_steps=1000,
                max_staleness=max_staleness,
            )
        ):
            outstanding[admitted] = published
            admitted += 1
        running = [g for g in outstanding if g not in finished]
        others = [g for g in running if g != straggler]
        # The straggler is last: it finishes only when nothing else can.
        if others:
            finished.append(data.draw(st.sampled_from(others)))
        elif running:
            finished.append(running[0])
        if len(finished) >= groups_per_step:
            taken, finished = finished[:groups_per_step], finished[groups_per_step:]
            for group in taken:
                assert steps - outstanding.pop(group) <= max_staleness
            steps += 1
        elif published < steps:
            published += 1
        else:
            assert running, "nothing runs, nothing may be admitted: the run is stuck"
    assert steps >= 60 // (2 * groups_per_step + 1) - 1


def test_c9_a_slow_trainer_bounds_what_is_admitted() -> None:
    load = Load(outstanding=48, steps=0, oldest_step=0, newest_step=0)
    assert allowance(load, max_outstanding=48, groups_per_step=16, total_steps=1000, max_staleness=None) == 0


def test_groups_lost_to_dead_letters_are_replaced() -> None:
    load = Load(outstanding=12, steps=0, oldest_step=0, newest_step=0)
    assert allowance(load, max_outstanding=48, groups_per_step=16, total_steps=1000, max_staleness=0) == 4


def test_nothing_is_admitted_for_a_version_that_is_too_old_by_the_time_it_is_trained_on() -> None:
    load = Load(outstanding=0, steps=5, oldest_step=None, newest_step=4)
    assert allowance(load, max_outstanding=48, groups_per_step=16, total_steps=1000, max_staleness=0) == 0
    assert allowance(load, max_outstanding=48, groups_per_step=16, total_steps=1000, max_staleness=1) == 16


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 3), st.integers(0, 9))
def test_a12_groups_that_are_too_old_already_leave_room_for_a_step(
    groups_per_step: int, outstanding: int, max_staleness: int, oldest: int
) -> None:
    load = Load(outstanding=outstanding, steps=9, oldest_step=oldest if outstanding else None, newest_step=9)
    allowed = allowance(
        load,
        max_outstanding=3 * groups_per_step,
        groups_per_step=groups_per_step,
        total_steps=1000,
        max_staleness=max_staleness,
    )
    assert outstanding + allowed >= groups_per_step


def test_no_group_is_admitted_that_the_last_step_does_not_take() -> None:
    load = Load(outstanding=3, steps=9, oldest_step=None, newest_step=9)
    assert allowance(load, max_outstanding=48, groups_per_step=4, total_steps=10, max_staleness=None) == 1
    assert allowance(load, max_outstanding=48, groups_per_step=4, total_steps=9, max_staleness=None) == 0
