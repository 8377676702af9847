"""The requests that an engine's process was given, and what has come of them and was not given out yet."""

from __future__ import annotations

from collections.abc import Iterable

from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.remote.wire import Piece
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Requests"]


class Requests:
    """See the module's docstring. Each submission has a number: the same trajectory may come again."""

    def __init__(self) -> None:
        self.submitted = 0
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._arrived: list[Piece] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._numbers

    @property
    def arrived(self) -> bool:
        """Whether there is something to give out."""
        return bool(self._arrived)

    def add(self, trajectory_id: str) -> int:
        """Its number."""
        number, self.submitted = self.submitted, self.submitted + 1
        self._numbers[trajectory_id] = number
        self._names[number] = trajectory_id
        return number

    def number(self, trajectory_id: str) -> int | None:
        """Of its submission; None: not here."""
        return self._numbers.get(trajectory_id)

    def take(self, pieces: Iterable[Piece]) -> None:
        """Keep what has come; what nobody waits for any more is dropped."""
        self._arrived += [piece for piece in pieces if piece.number in self._names]

    def has_ended(self, number: int) -> bool:
        """Whether its last piece has come."""
        return any(piece.number == number and piece.ends for piece in self._arrived)

    def give_out(self) -> list[Delta]:
        """All that has come, as one delta for each trajectory."""
        arrived, self._arrived = self._arrived, []
        by_number: dict[int, list[Piece]] = {}
        for piece in arrived:
            by_number.setdefault(piece.number, []).append(piece)
        deltas = []
        for number, pieces in by_number.items():
            deltas.append(_delta(self._names[number], pieces))
            if pieces[-1].ends:
                del self._numbers[self._names.pop(number)]
        return deltas

    def withdraw(self, trajectory_id: str) -> Delta:
        """Forget it; what had come of it."""
        number = self._numbers.pop(trajectory_id)
        del self._names[number]
        mine = [piece for piece in self._arrived if piece.number == number]
        if mine:
            self._arrived = [piece for piece in self._arrived if piece.number != number]
        return _delta(trajectory_id, mine)


def _delta(trajectory_id: str, pieces: list[Piece]) -> Delta:
    if not pieces:
        return Delta(trajectory_id=trajectory_id, tokens=EMPTY)
    last = pieces[-1]
    tokens = last.tokens if len(pieces) == 1 else Tokens.concat(piece.tokens for piece in pieces)
    return Delta(trajectory_id=trajectory_id, tokens=tokens, finish=last.finish, error=last.error)
