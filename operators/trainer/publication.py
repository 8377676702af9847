"""Keeps trying to publish the newest version; never holds up training for longer than its deadline (A8, A11)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from laminar.operators.operator import Context
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.learner import Learner
from laminar.operators.trainer.publish import publish
from laminar.operators.weights import WeightPublisher
from laminar.schemas.errors import Retryable
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["Publication"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    epoch: int
    version: int
    parent: int
    step: int


class Publication:
    """The version that is not published yet, if there is one. A newer request supersedes an older one."""

    def __init__(self, learner: Learner, publisher: WeightPublisher, config: TrainerConfig, context: Context) -> None:
        self._learner = learner
        self._publisher = publisher
        self._config = config
        self._context = context
        self._wanted: _Wanted | None = None
        self._next_at = 0.0
        self._failures = 0
        self._identical = 0
        self._last_s = 0.0
        self._probes_s = 0.0

    def request(self, *, epoch: int, version: int, parent: int, step: int) -> None:
        """Publish the learner's weights, as they are when ``attempt`` is called, as this version."""
        self._wanted = _Wanted(epoch, version, parent, step)
        self._next_at = 0.0

    def metrics(self) -> dict[str, float]:
        """Seconds of the newest attempt, and the part of it in which the learner was asked for its probes; and alarms,
        counted since the process began: attempts that failed, and publications with exactly the bytes of the last."""
        return {
            "publish_s": self._last_s,
            "probes_s": self._probes_s,
            "publish_failures": float(self._failures),
            "publish_identical": float(self._identical),
        }

    def due(self, now: float) -> bool:
        """Whether it is time for an attempt."""
        return self._wanted is not None and now >= self._next_at

    def attempt(self, now: float, write: Callable[[VersionManifest], None]) -> None:
        """Try once. A relay that does not take the weights is a warning, and is tried again later. Raises Fatal."""
        wanted = self._wanted
        if wanted is None:
            return
        began = self._context.stopwatch()
        deadline = Deadline.after(
            self._config.publish_timeout_s, f"trainer publishes version {wanted.version}", self._context.clock
        )
        probes = self._learner.probes()
        self._probes_s = self._context.stopwatch() - began
        try:
            committed = publish(
                self._learner,
                self._publisher,
                write,
                epoch=wanted.epoch,
                version=wanted.version,
                parent=wanted.parent,
                step=wanted.step,
                deadline=deadline,
                probes=probes,
            )
        except Retryable as error:
            self._failures += 1
            self._next_at = now + self._config.publish_retry_s
            logger.warning("version %d is not published, training goes on: %s", wanted.version, error)
        else:
            self._wanted = None
            self._identical += "identical_to" in committed.meta
        self._last_s = self._context.stopwatch() - began
