"""Gets weights into the engine: one attempt at a time, each with a deadline, with back-off between them.

Weights that cannot be had now (no relay has them, a relay died, a digest is wrong) are a reason to try again, never to
stop. Weights that the engine refuses are: model and run do not belong together, and the error flies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from laminar.operators.rollout.engine import Engine
from laminar.operators.weights import WeightSource
from laminar.schemas.errors import Retryable, WeightsMismatch
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["Loader"]

logger = logging.getLogger(__name__)


class Loader:
    """See the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        source: WeightSource,
        *,
        clock: Callable[[], float],
        backoff_s: float,
        backoff_max_s: float,
    ) -> None:
        self._engine = engine
        self._source = source
        self._clock = clock
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._version = -1
        self._next_at = 0.0
        self.failures = 0
        """Failed attempts in a row for the version asked for last."""
        self._failing_since: float | None = None

    def failing_s(self, now: float) -> float:
        """For how long every attempt has failed, whichever version it was for; 0 after a success."""
        return 0.0 if self._failing_since is None else now - self._failing_since

    def is_due(self, version: int, now: float) -> bool:
        """Whether the back-off of this version is over."""
        return version != self._version or now >= self._next_at

    def load(self, manifest: VersionManifest, now: float, *, timeout_s: float) -> bool:
        """Try once. False: not to be had now. Raises WeightsMismatch when the engine refuses them."""
        if manifest.version != self._version:
            self._version, self.failures = manifest.version, 0
        deadline = Deadline.after(timeout_s, f"weights of version {manifest.version}", self._clock)
        with ExitStack() as stack:
            try:
                views = stack.enter_context(self._source.open(manifest, deadline))
            except (Retryable, WeightsMismatch) as error:
                wait_s = min(self._backoff_s * 2 ** min(self.failures, 16), self._backoff_max_s)
                self.failures += 1
                self._next_at = now + wait_s
                self._failing_since = now if self._failing_since is None else self._failing_since
                logger.warning("version %d: trying again in %.1f s: %s", manifest.version, wait_s, error)
                return False
            self._engine.load(views, manifest.version)
        self.failures, self._failing_since = 0, None
        logger.info("loaded version %d", manifest.version)
        return True
