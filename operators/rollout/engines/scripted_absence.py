"""When a scripted engine is lost, and when it is back: as if it lived in a process of its own.

>>> absence = Absence(away=2.0, clock=None)
>>> absence.expect("abort")
>>> absence.due("poll"), absence.due("abort")
(None, 'was lost in abort, as scripted')
>>> absence.begin()
>>> [absence.look() for _ in range(3)]
[False, True, True]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from laminar.schemas.errors import ConfigError

__all__ = ["Absence", "Call"]

Call = Literal["any", "submit", "abort", "poll", "load", "stats", "decode"]
"""At which call a loss is noticed."""


@dataclass(slots=True)
class _Expected:
    call: Call
    skip: int
    away: float | None


class Absence:
    """See the module's docstring."""

    def __init__(self, *, away: float | None, clock: Callable[[], float] | None) -> None:
        """``away``: how long, in seconds of the clock or in polls where there is none; None: it cannot be lost."""
        self._away = away
        self._clock = clock
        self._expected: _Expected | None = None
        self._left = 0.0
        self._since = 0.0
        self.present = True

    @property
    def possible(self) -> bool:
        """Whether it can be lost."""
        return self._away is not None

    def expect(self, call: Call, *, skip: int = 0, away: float | None = None) -> None:
        """It is lost at the next such call, after ``skip`` others; ``away``: for so long, this time."""
        if not self.possible:
            raise ConfigError("ScriptedEngine.lose: only one with `away` can be lost; the others live in their caller")
        self._expected = _Expected(call, skip, away)

    def due(self, call: Call) -> str | None:
        """Why it is lost now; None: it is not."""
        expected = self._expected
        if expected is None or not self.present or expected.call not in ("any", call):
            return None
        if expected.skip:
            expected.skip -= 1
            return None
        return f"was lost in {call}, as scripted"

    def begin(self) -> None:
        """It is away from now on."""
        expected, self._expected = self._expected, None
        away = self._away if expected is None or expected.away is None else expected.away
        assert away is not None
        self.present = False
        self._left = away
        self._since = self._clock() if self._clock is not None else 0.0

    def look(self) -> bool:
        """A poll: whether it is there."""
        if not self.present:
            if self._clock is None:
                self._left -= 1
            self.present = self._left <= (self._clock() - self._since if self._clock is not None else 0.0)
        return self.present
