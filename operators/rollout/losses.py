"""How often a rollout has lost its engine, and when that is too often for its process to go on."""

from __future__ import annotations

import logging

from laminar.schemas.errors import EngineLost, Unavailable

__all__ = ["Losses"]

logger = logging.getLogger(__name__)


class Losses:
    """Of one process. ``too_many``: losses without a token in between that end it."""

    def __init__(self, too_many: int) -> None:
        self.n = 0
        """Since the process began."""
        self._too_many = too_many
        self._in_a_row = 0

    def sampled(self) -> None:
        """A token came out of the engine."""
        self._in_a_row = 0

    def count(self, error: EngineLost, *, n: int, n_tokens: int) -> None:
        """Another one, after which so many trajectories with so many tokens go back to the pool."""
        self.n += 1
        self._in_a_row += 1
        logger.error(
            "lost its engine, for the %d. time since its start: %d trajectories with %d tokens go back to the pool: %s",
            self.n,
            n,
            n_tokens,
            error,
        )

    def check(self, error: EngineLost) -> None:
        """Raise Unavailable when it was one too many."""
        if self._in_a_row >= self._too_many:
            raise Unavailable(f"lost its engine {self._in_a_row} times without a token in between: {error}")
