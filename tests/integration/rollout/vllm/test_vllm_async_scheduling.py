"""vLLM schedules a step while the one before it is still on its way: each token belongs to one version all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pytest

from laminar.operators.weights import TensorView
from tests.integration.rollout.vllm.conftest import ARGS, Policy
from tests.integration.rollout.vllm.test_vllm_provenance import _in_flight, _pinned

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

AHEAD = {**ARGS, "async_scheduling": True}


@pytest.fixture(scope="module")
def ahead(start: Callable[..., VllmEngine]) -> VllmEngine:
    made = start(args=AHEAD)
    assert made._vllm.engine_core.engine_core.batch_queue is not None
    return made


@pytest.mark.parametrize("mode", [_in_flight, _pinned], ids=["in flight", "pinned"])
def test_c4_every_logprob_is_the_trainers_with_a_step_on_its_way_at_each_of_20_updates(
    ahead: VllmEngine, policy: Policy, mode: Callable[[VllmEngine, Policy], float]
) -> None:
    assert mode(ahead, policy) < 1e-4
    ahead.poll(0.0)  # what was begun before the last of them ended
    assert not ahead._core.busy
    assert (ahead.stats().running, ahead.stats().waiting, ahead.stats().kv_used) == (0, 0, 0)


def test_a_step_on_its_way_that_is_booked_under_the_next_version_is_noticed_by_these_tests(
    start: Callable[..., VllmEngine], policy: Policy
) -> None:
    from laminar.operators.rollout.engines.vllm import VllmEngine

    class Late(VllmEngine):
        def _drop_caches(self) -> None:
            self._late = self._core.pause()

        def load(self, weights: Mapping[str, TensorView], version: int) -> None:
            super().load(weights, version)
            for outputs in self._late:
                self._take(outputs)

    assert _in_flight(start(Late, args=AHEAD), policy) > 0.1
