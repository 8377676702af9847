"""The scripted engine of a simulated rollout: it may crash, stall or be lost, and is where a rollout may be stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.scripted import ScriptedEngine
from laminar.operators.rollout.engines.scripted_absence import Call
from laminar.operators.weights import TensorView
from laminar.pipeline.simulation.clock import EPOCH_S
from laminar.pipeline.simulation.fault import FAULTS_END_S
from laminar.pipeline.simulation.scenario import Scenario
from laminar.schemas.errors import Unavailable

__all__ = ["SimulatedEngine"]


class SimulatedEngine(ScriptedEngine):
    """Follows the virtual clock."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Callable[[], float],
        point: Callable[[str], None],
        loaded: Callable[[int, bool], None],
    ) -> None:
        """``point`` is called with each poll, ``loaded`` with each version and whether trajectories were here."""
        super().__init__(
            scenario.answer,
            max_running=scenario.max_running,
            max_model_len=64,
            kv_total=scenario.kv_total,
            tokens_per_s=scenario.tokens_per_s,
            clock=clock,
            away=1.0,
        )
        self._now = clock
        self._point = point
        self._loaded = loaded
        self.stalled_until = 0.0
        self.broken = False

    def poll(self, timeout_s: float) -> list[Delta]:
        """See Engine."""
        self._point("engine")
        if self.broken:
            raise Unavailable("the engine died")
        if self._now() < self.stalled_until:
            return []
        return super().poll(timeout_s)

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """See Engine."""
        stats = self.stats()
        super().load(weights, version)
        self._loaded(version, stats.running + stats.waiting > 0)

    def _enter(self, call: Call) -> None:
        if self._now() < EPOCH_S + FAULTS_END_S:
            super()._enter(call)
