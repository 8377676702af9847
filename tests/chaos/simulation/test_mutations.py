"""The proof that the simulation can see: each deliberate bug is found."""

from __future__ import annotations

import pytest

from laminar.pipeline.simulation.campaign import workbench
from tests.chaos.simulation.mutations import MUTATIONS, SEEDS, found_by, seeds_needed


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="laminar")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_bug_is_found(name: str) -> None:
    """By the seed that is known to find it, which finds nothing without the bug; else by the first that does."""
    mutation = MUTATIONS[name]
    with workbench() as bench:
        assert bench.run(mutation.seed).violations == ()
        if found_by(mutation, bench, mutation.seed):
            return
    assert seeds_needed(mutation)[0] > 0, f"{name} is not found by {SEEDS} seeds: {mutation.breaks}"
