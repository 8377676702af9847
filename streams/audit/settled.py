"""The members that have their fate for good, in a byte each, or less.

Ids are ``{dataset}/{epoch}/{index}/{member}``, dense within one pass over the data: each pass has pages of 4096
members, one byte a member (fate and attempt). A page whose members all met the same fate in the same attempt becomes
one number. Ids of any other form are kept one by one.

>>> settled = Settled()
>>> settled.add("d/0/7/3", "trained", 1)
>>> settled.get("d/0/7/3"), settled.get("d/0/7/2")
(Fate(name='trained', attempt=1), None)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MANY", "Fate", "Settled"]

_PAGE = 4096
MANY = 15
"""Attempts from here on are told as this."""
_MOST_FATES = 15


class Fate(NamedTuple):
    """What became of a member."""

    name: str
    """``trained``, or the reason why it was dropped."""
    attempt: int
    """The newest one; 15 = 15 or more."""


class _Pass:
    """One pass over the data."""

    __slots__ = ("counts", "pages", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        """Members per group."""
        self.pages: dict[int, bytearray | int] = {}
        self.counts: dict[int, int] = {}
        """Page -> members in it, while it is not full."""


class Settled:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}
        self._others: dict[str, int] = {}
        self._names: list[str] = []
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, trajectory_id: str, name: str, attempt: int, group_size: int = 16) -> None:
        """Take a member that is not here. ``group_size``: of its group."""
        if name not in self._names:
            if len(self._names) == _MOST_FATES:
                raise OverflowError(f"more than {_MOST_FATES} kinds of fates: {', '.join(self._names)}, {name}")
            self._names.append(name)
        code = (self._names.index(name) + 1) << 4 | min(attempt, MANY)
        self._n += 1
        prefix, at = self._at(trajectory_id, group_size)
        if at is None:
            self._others[trajectory_id] = code
            return
        known = self._passes[prefix]
        number, slot = divmod(at, _PAGE)
        page = known.pages.get(number)
        if page is None:
            page = known.pages[number] = bytearray(_PAGE)
        assert isinstance(page, bytearray)
        page[slot] = code
        count = known.counts[number] = known.counts.get(number, 0) + 1
        if count == _PAGE:
            del known.counts[number]
            if page.count(code) == _PAGE:
                known.pages[number] = code

    def get(self, trajectory_id: str) -> Fate | None:
        """The fate of a member; None: it is not here."""
        code = self._code(trajectory_id)
        return Fate(self._names[(code >> 4) - 1], code & 15) if code else None

    def remove(self, trajectory_id: str) -> None:
        """Forget a member that is here."""
        self._n -= 1
        prefix, at = self._at(trajectory_id, 0)
        if at is None:
            del self._others[trajectory_id]
            return
        known = self._passes[prefix]
        number, slot = divmod(at, _PAGE)
        page = known.pages[number]
        if isinstance(page, int):
            page = known.pages[number] = bytearray((page,)) * _PAGE
        page[slot] = 0
        known.counts[number] = known.counts.get(number, _PAGE) - 1

    def _code(self, trajectory_id: str) -> int:
        prefix, at = self._at(trajectory_id, 0)
        if at is None:
            return self._others.get(trajectory_id, 0)
        number, slot = divmod(at, _PAGE)
        page = self._passes[prefix].pages.get(number, 0)
        return page if isinstance(page, int) else page[slot]

    def _at(self, trajectory_id: str, group_size: int) -> tuple[str, int | None]:
        """Its pass, and its number in it; None: it is (to be) kept by itself. ``group_size`` 0: make no new pass."""
        parts = trajectory_id.rsplit("/", 2)
        if len(parts) != 3 or not (_plain(parts[1]) and _plain(parts[2])):
            return trajectory_id, None
        known = self._passes.get(parts[0])
        if known is None:
            if not group_size:
                return trajectory_id, None
            known = self._passes[parts[0]] = _Pass(group_size)
        member = int(parts[2])
        return (parts[0], int(parts[1]) * known.width + member) if member < known.width else (trajectory_id, None)


def _plain(number: str) -> bool:
    """Whether it is what ``str`` makes of the number: no sign, no leading zero, ASCII."""
    return number.isascii() and number.isdigit() and (number == "0" or number[0] != "0")
