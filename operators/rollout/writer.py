"""The rollout's transactions, one at a time: in the step, or beside it on a log that bears it.

Beside it the engine goes on while the log is written. What became of such a transaction is learned by a later ``land``,
and what follows from it happens there, on the step's own thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from laminar.schemas.errors import DeadlineExceeded, LaminarError
from laminar.streams.background import Background, Call
from laminar.streams.log import Producer

__all__ = ["Outcome", "Writer"]

_LONGEST_S = 300.0
"""Of waiting for a transaction, which the log's own time-outs bound."""
_LEAVE_S = 2.0

Outcome = Callable[[], None]
"""Raises what the transaction raised."""

logger = logging.getLogger(__name__)


class Writer:
    """See the module's docstring."""

    def __init__(self, producer: Producer, background: Background | None) -> None:
        self.producer = producer
        self._background = background
        self._call: Call | None = None
        self._then: Callable[[Outcome], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a transaction is being made beside the step."""
        return self._call is not None

    def write(self, make: Callable[[], None], then: Callable[[Outcome], None], *, here: bool = False) -> None:
        """Make a transaction, and call ``then`` with its outcome: now, or in ``land`` if it is made beside the step.

        ``here``: in the step in any case. Raises what ``then`` raises. Not while ``busy``.
        """
        if self._call is not None:
            raise AssertionError("a transaction is being made")
        if self._background is None or here:
            then(make)
        else:
            self._then = then
            self._call = self._background(make)

    def land(self, *, wait: bool = False) -> bool:
        """Whether a transaction that was made beside the step has ended; then with its consequences.

        ``wait``: for its end. Raises what follows from it.
        """
        call, then = self._call, self._then
        if call is None or then is None:
            return False
        if wait and not call.wait(_LONGEST_S):
            raise DeadlineExceeded(f"a transaction of the rollout ends: not within {_LONGEST_S:g} s")
        if not call.done():
            return False
        self._call = self._then = None
        then(call.result)
        return True

    def close(self) -> None:
        """Release the producer. A transaction that is being made may end; what follows from it does not happen."""
        call, self._call = self._call, None
        self._then = None
        if call is not None and call.wait(_LEAVE_S):
            try:
                call.result()
            except LaminarError as error:
                logger.warning("the last transaction failed: %s", error)
        self.producer.close()
