"""An engine whose version counts only once its logprobs are the trainer's: what the rollout operator works with.

Guarantees:

* After a load, ``version`` is -1 until ``confirm`` has found the engine's answers to the manifest's probes to be the
  trainer's (``self_check``): nothing is submitted, and no trajectory is adopted.
* What the engine samples of other trajectories meanwhile is held back, and comes with the next ``poll`` if it passed.
* A mismatch: the engine is given up (``restart``), and nothing that it sampled since the load is seen by anybody. One
  that was started anew and fails again stays, unconfirmed: starting it does not help, another version may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from laminar.operators.measure import Measures
from laminar.operators.rollout.config import SelfCheckConfig
from laminar.operators.rollout.engine import Delta, Engine, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.self_check import ask, judge, questions, tolerance_of
from laminar.operators.weights import TensorView
from laminar.schemas.errors import Unavailable
from laminar.schemas.records import VersionManifest
from laminar.schemas.tokens import EMPTY, Tokens
from laminar.streams.deadline import Deadline

__all__ = ["CheckedEngine"]

logger = logging.getLogger(__name__)


class CheckedEngine:
    """See the module's docstring; everything else is the engine's own (``engine.Engine``)."""

    def __init__(
        self, engine: Engine, config: SelfCheckConfig, *, clock: Callable[[], float], measures: Measures
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self._measures = measures
        self._confirmed = engine.version >= 0
        self._proven = False
        """Whether it was confirmed since it started."""
        self._strikes = 0
        """Failed checks in a row since it started anew."""
        self._unchecked = 0
        """Loads since the last check."""
        self._failures = 0
        self._skipping = False
        self._held: list[Delta] = []

    def confirm(self, manifest: VersionManifest) -> bool:
        """Whether the version that was just loaded counts. False: it does not, and the engine stays unconfirmed.

        Raises EngineLost when the engine is started anew for it, Unavailable when its process has to be.
        """
        wrong = self._wrong(manifest)
        if wrong is None:
            self._confirmed = self._proven = True
            self._strikes = 0
            return True
        self._failures += 1
        self._report()
        why = f"self-check of version {manifest.version}: {wrong}"
        logger.error("engine %s: %s", self.name, why)
        self._strikes = 0 if self._proven else self._strikes + 1
        proven, self._proven = self._proven, False
        if self._strikes > 1:
            return False
        try:
            self._engine.restart(why)
        except Unavailable:
            if proven:
                raise
        return False

    def asks(self, manifest: VersionManifest) -> int:
        """How many requests ``confirm`` will put after the next load."""
        return len(questions(manifest, limits=self.limits)) if self._due else 0

    @property
    def out_of_service(self) -> bool:
        """Started anew, it failed twice and more: it waits for another version."""
        return self._strikes > 1

    @property
    def _due(self) -> bool:
        """Whether the next load is checked."""
        every = self._config.every
        fresh = not self._proven or self._engine.version < 0
        return every > 0 and (fresh or self._unchecked + 1 >= every)

    def _wrong(self, manifest: VersionManifest) -> str | None:
        """What the check finds; None: nothing, or there is none to make."""
        due = self._due
        self._unchecked += 1
        if not due:
            return None
        asked = questions(manifest, limits=self.limits)
        if not asked:
            if not self._skipping:
                logger.warning(
                    "version %d: no self-check, since %s",
                    manifest.version,
                    "no probe is short enough for the engine" if manifest.probes else "its trainer sent no probes",
                )
            self._skipping = True
            return None
        self._skipping = False
        deadline = Deadline.after(
            self._config.timeout_s, f"self-check of version {manifest.version} by {self.name}", self._clock
        )
        held: list[Delta] = []
        findings = ask(self._engine, asked, deadline, held=held)
        tolerance = self._config.tolerance or tolerance_of(manifest)
        self._unchecked = 0
        most = max(finding.nats for finding in findings)
        self._report(most)
        level = logging.DEBUG if self._proven else logging.INFO
        logger.log(
            level,
            "version %d: %d logprobs differ from the trainer's by at most %.3g nats (bound %g)",
            manifest.version,
            len(findings),
            most,
            tolerance,
        )
        wrong = judge(findings, tolerance)
        if wrong is None:
            self._held += held
        return wrong

    def _report(self, most: float | None = None) -> None:
        gauges = self._measures.gauges
        most = gauges.get("rollout_self_check_difference_nats", 0.0) if most is None else most
        self._measures.gauges.update(
            rollout_self_check_failures=float(self._failures), rollout_self_check_difference_nats=most
        )

    # -- Engine

    @property
    def name(self) -> str:
        """See Engine.name."""
        return self._engine.name

    @property
    def version(self) -> int:
        """The version that was confirmed; -1: none is."""
        return self._engine.version if self._confirmed else -1

    @property
    def limits(self) -> EngineLimits:
        """See Engine.limits."""
        return self._engine.limits

    @property
    def ready(self) -> bool:
        """See Engine.ready."""
        return self._engine.ready

    def submit(self, request: EngineRequest) -> None:
        """See Engine.submit."""
        self._engine.submit(request)

    def abort(self, trajectory_id: str) -> Delta | None:
        """See Engine.abort."""
        mine = [delta for delta in self._held if delta.trajectory_id == trajectory_id]
        rest = self._engine.abort(trajectory_id)
        if rest is not None and not self._confirmed:
            return Delta(trajectory_id=trajectory_id, tokens=EMPTY)
        if not mine:
            return rest
        self._held = [delta for delta in self._held if delta.trajectory_id != trajectory_id]
        parts = [*mine, *([] if rest is None else [rest])]
        return Delta(
            trajectory_id=trajectory_id,
            tokens=Tokens.concat(part.tokens for part in parts),
            finish=parts[-1].finish,
            error=parts[-1].error,
        )

    def poll(self, timeout_s: float) -> list[Delta]:
        """See Engine.poll."""
        if self._held:
            held, self._held = self._held, []
            return held
        deltas = self._engine.poll(timeout_s)
        return deltas if self._confirmed else []

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """See Engine.load. ``confirm`` comes next."""
        if self._engine.version < 0:
            self._proven = False  # it has just started
        self._engine.load(weights, version)
        self._confirmed = False

    def stats(self) -> EngineStats:
        """See Engine.stats."""
        return self._engine.stats()

    def restart(self, why: str) -> None:
        """See Engine.restart."""
        self._engine.restart(why)

    def decode(self, ids: tuple[int, ...]) -> str:
        """See Engine.decode."""
        return self._engine.decode(ids)

    def close(self) -> None:
        """See Engine.close."""
        self._engine.close()
