"""Who runs an author's function for the exactly-once loop (``loop.py``): in the step itself, or elsewhere.

>>> worker = Inline(lambda record: [])
>>> worker.submit(1, None)                                              # type: ignore[arg-type]
>>> worker.collect()
[Result(ticket=1, outputs=(), error=None)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from laminar.schemas.records import Record

__all__ = ["Function", "Inline", "Result", "Worker"]

Function = Callable[[Record], Iterable[Record]]
"""From one input record to its output records (none is fine). Pure: it may run again for the same record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one call of the function ended."""

    ticket: int
    outputs: tuple[Record, ...] = ()
    error: Exception | None = None
    """Set when it raised; ``outputs`` does not count then."""


class Worker(Protocol):
    """Runs the function, here or elsewhere. No call waits for it."""

    def submit(self, ticket: int, record: Record) -> None:
        """Begin, or queue, one call."""

    def collect(self) -> list[Result]:
        """Calls that ended since; each ticket once."""

    def cancel(self, ticket: int) -> None:
        """Forget a call: its result is not wanted any more."""

    def close(self) -> None:
        """Forget all."""


class Inline:
    """Runs a fast function inside the step, a few calls at a time."""

    def __init__(self, function: Function, *, calls_per_step: int = 32) -> None:
        self._function = function
        self._calls_per_step = calls_per_step
        self._queue: dict[int, Record] = {}

    def submit(self, ticket: int, record: Record) -> None:
        """Queue."""
        self._queue[ticket] = record

    def collect(self) -> list[Result]:
        """Run the next few."""
        return [self._call(ticket) for ticket in list(self._queue)[: self._calls_per_step]]

    def cancel(self, ticket: int) -> None:
        """Forget."""
        self._queue.pop(ticket, None)

    def close(self) -> None:
        """Forget all."""
        self._queue.clear()

    def _call(self, ticket: int) -> Result:
        record = self._queue.pop(ticket)
        try:
            return Result(ticket=ticket, outputs=tuple(self._function(record)))
        except Exception as error:  # noqa: BLE001 - the dead-letter spot: whatever an author's function raises
            return Result(ticket=ticket, error=error)
