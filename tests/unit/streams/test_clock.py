"""The operators' clock."""

from __future__ import annotations

import time

from laminar.streams.clock import SteadyClock


def test_a_wall_clock_that_is_set_does_not_move_it() -> None:
    wall, elapsed = [1_000_000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    wall[0] -= 3600.0
    elapsed[0] += 2.0
    assert clock() == 1_000_002.0


def test_it_begins_as_the_wall_clock() -> None:
    assert abs(SteadyClock()() - time.time()) < 5.0
