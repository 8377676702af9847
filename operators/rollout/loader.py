"""Gets weights into the engine: one attempt at a time, each with a deadline, with back-off between them.

Weights that cannot be had now (no relay has them, a relay died, a digest is wrong) are a reason to try again, never to
stop. Weights that the engine refuses are: model and run do not belong together, and the error flies. Weights under
which the engine's logprobs are not the trainer's are loaded again once; after that the engine waits, out of service,
for a newer version, longer with each that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from laminar.operators.rollout.checked_engine import CheckedEngine
from laminar.operators.weights import WeightSource
from laminar.schemas.errors import EngineLost, Retryable, WeightsMismatch
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["Loader"]

_OUT_S = 5.0
"""The least that an engine out of service waits; doubles with each version that fails."""
_OUT_MAX_S = 300.0

logger = logging.getLogger(__name__)


class Loader:
    """See the module's docstring."""

    def __init__(
        self,
        engine: CheckedEngine,
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
        self._versions_failed = 0
        """In a row, while out of service."""
        self._refused = -1
        """The version that put the engine out of service, or failed then."""

    def failing_s(self, now: float) -> float:
        """For how long every attempt has failed, whichever version it was for; 0 after a success."""
        return 0.0 if self._failing_since is None else now - self._failing_since

    def is_due(self, version: int, now: float) -> bool:
        """Whether the back-off of this version is over."""
        if self._engine.out_of_service:
            return version > self._refused and now >= self._next_at
        return version != self._version or now >= self._next_at

    def fetch(self, manifest: VersionManifest, now: float) -> VersionManifest | None:
        """What ``load`` gets at once: this version, or one before it that was on its way. None: nothing yet."""
        try:
            return self._source.fetch(manifest)
        except (Retryable, WeightsMismatch) as error:
            if manifest.version != self._version:
                self._version, self.failures = manifest.version, 0
            wait_s = self._failed(now)
            logger.warning("version %d: trying again in %.1f s: %s", manifest.version, wait_s, error)
            return None

    def load(self, manifest: VersionManifest, now: float, *, timeout_s: float) -> bool:
        """Try once. False: not to be had now, or the engine failed the self-check and stays.

        Raises WeightsMismatch when the engine refuses them, EngineLost or Unavailable when it failed the self-check and
        starts anew.
        """
        if manifest.version != self._version:
            self._version, self.failures = manifest.version, 0
        deadline = Deadline.after(timeout_s, f"weights of version {manifest.version}", self._clock)
        with ExitStack() as stack:
            try:
                views = stack.enter_context(self._source.open(manifest, deadline))
            except (Retryable, WeightsMismatch) as error:
                wait_s = self._failed(now)
                logger.warning("version %d: trying again in %.1f s: %s", manifest.version, wait_s, error)
                return False
            try:
                self._engine.load(views, manifest.version)
            except EngineLost:
                self._failed(now)
                raise
            except WeightsMismatch as error:
                raise WeightsMismatch(f"version {manifest.version}: {error}") from error
        try:
            confirmed = self._engine.confirm(manifest)
        except EngineLost:
            self._failed(now)
            raise
        if not confirmed:
            self._unconfirmed(manifest, now)
            return False
        self.failures, self._failing_since, self._versions_failed = 0, None, 0
        logger.info("loaded version %d", manifest.version)
        return True

    def _failed(self, now: float) -> float:
        """Take note of it; the seconds until the next attempt."""
        wait_s: float = min(self._backoff_s * 2 ** min(self.failures, 16), self._backoff_max_s)
        self.failures += 1
        self._next_at = now + wait_s
        self._failing_since = now if self._failing_since is None else self._failing_since
        return wait_s

    def _unconfirmed(self, manifest: VersionManifest, now: float) -> None:
        wait_s = self._failed(now)
        if not self._engine.out_of_service:
            logger.warning("version %d: loading it again in %.1f s", manifest.version, wait_s)
            return
        wait_s = min(_OUT_S * 2 ** min(self._versions_failed, 16), _OUT_MAX_S)
        self._versions_failed += 1
        self._refused = manifest.version
        self._next_at = now + wait_s
        logger.error(
            "engine %s: out of service: it samples nothing before a version after %d passes the self-check (not before"
            " %.0f s from now)",
            self._engine.name,
            manifest.version,
            wait_s,
        )
