"""Dead letters, what persons decided about them, and offsets that were skipped by configuration.

All letters of a run are kept: they are few, and any of them may be settled at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from laminar.schemas import records as r
from laminar.streams.ledger import Place, Skipped, Violation

__all__ = ["Letter", "LetterBook"]

_ONCE = frozenset({"prompts", "trajectories.completed"})
"""Topics whose consumers write a record's letter in the transaction that passes it."""

_AGAIN = frozenset({"prompts", "trajectories.completed", "trajectories.scored"})
"""Topics on which a letter's record stands again after a retry."""


@dataclass(slots=True, eq=False)
class Letter:
    """A dead letter."""

    place: Place
    source: Place
    group_id: str
    """``""``: it is not known."""
    trajectory_ids: tuple[str, ...]
    retried: Place | None = None
    """Where it was settled by a retry: it is no fate any more."""


class LetterBook:
    """See the module's docstring. Records come in any order."""

    def __init__(self) -> None:
        self.by_place: dict[Place, Letter] = {}
        self.by_source: dict[Place, list[Letter]] = {}
        self.skipped: list[Skipped] = []
        self._settled: dict[Place, tuple[Place, r.DeadLetterSettled]] = {}
        """Place of the letter -> the first decision, and where it stands."""
        self._again: dict[str, Place] = {}
        """Place of the letter -> the record that stands again because of it."""

    def letter(self, place: Place, record: r.DeadLetter) -> Letter:
        """Take a letter."""
        source = Place(record.topic, record.partition, record.offset)
        group = record.group_id or (record.key or b"").decode("utf-8", "replace")
        made = Letter(place, source, group, record.trajectory_ids)
        self.by_place[place] = made
        if source.offset >= 0:
            self.by_source.setdefault(source, []).append(made)
        if (decided := self._settled.get(place)) is not None:
            self._decide(made, *decided)
        return made

    def settle(self, place: Place, record: r.DeadLetterSettled) -> None:
        """Take a decision; only the first about a letter counts."""
        about = Place(place.topic, record.letter_partition, record.letter_offset)
        known = self._settled.get(about)
        if known is not None and known[0] <= place:
            return
        self._settled[about] = (place, record)
        if about in self.by_place:
            self._decide(self.by_place[about], place, record)

    def stands_again(self, place: Place, letter: str) -> None:
        """A record says that it was put on its topic again. ``letter``: the place of its letter."""
        self._again.setdefault(letter, place)

    def skip(self, record: r.OffsetsSkipped) -> None:
        """Take a jump of a group."""
        made = Skipped(
            group=record.group,
            topic=record.topic,
            partition=record.partition,
            from_offset=record.from_offset,
            to_offset=record.to_offset,
        )
        if made not in self.skipped:
            self.skipped.append(made)

    def was_skipped(self, place: Place) -> bool:
        """Whether its consumer jumped over this record."""
        return any(
            (one.topic, one.partition) == place[:2] and one.from_offset <= place.offset < one.to_offset
            for one in self.skipped
        )

    def standing(self, source: Place) -> Letter | None:
        """The letter that names nobody, but is about this record and still its fate."""
        found = self.by_source.get(source, ())
        return next((one for one in found if one.retried is None and not one.trajectory_ids), None)

    @property
    def retried(self) -> int:
        """Letters that were given back."""
        return sum(one.retried is not None for one in self.by_place.values())

    def unnamed(self, unreadable: Container[Place]) -> Counter[str]:
        """Group -> records of it that are dead, but of which nobody could tell whose they are."""
        found: Counter[str] = Counter()
        for source, letters in self.by_source.items():
            first = letters[0]
            if source.topic not in ("trajectories.completed", "trajectories.scored") or source not in unreadable:
                continue
            if not first.trajectory_ids and any(one.retried is None for one in letters):
                found[first.group_id] += 1
        return found

    def violations(self, old: Callable[[Place], bool], *, incomplete: bool) -> Iterator[Violation]:
        """What the letters contradict by themselves. ``old``: what it needs must be there by now."""
        for source, letters in self.by_source.items():
            if source.topic in _ONCE and len(letters) > 1:
                again = max(letters, key=lambda one: one.place)
                places = tuple(str(one.place) for one in (again, *(x for x in letters if x is not again)))
                yield Violation(
                    kind="letter_twice",
                    trajectory_id=again.group_id or str(source),
                    place=str(again.place),
                    detail=f"{source} is also dead at {places[1]}",
                    places=places,
                )
        for about, (place, record) in self._settled.items():
            if about not in self.by_place and old(place) and not incomplete:
                yield Violation(
                    kind="no_letter",
                    trajectory_id=", ".join(record.trajectory_ids) or record.group_id or str(about),
                    place=str(place),
                    detail=f"{record.action} of {about}, where no dead letter is",
                    places=(str(place), str(about)),
                )
        retried = {str(one.place): one for one in self.by_place.values() if one.retried is not None}
        for name, letter in retried.items():
            placed = letter.source.offset >= 0 and letter.source.topic in _AGAIN
            if placed and name not in self._again and letter.retried is not None and old(letter.retried):
                yield Violation(
                    kind="lost",
                    trajectory_id=", ".join(letter.trajectory_ids) or letter.group_id,
                    place=str(letter.retried),
                    detail=f"{letter.source} was given back, but stands nowhere again",
                    places=(str(letter.retried), name),
                )
        for name, place in self._again.items():
            if name not in retried and old(place) and not incomplete:
                yield Violation(
                    kind="no_letter",
                    trajectory_id=name,
                    place=str(place),
                    detail=f"it stands again because of {name}, which nobody has given back",
                    places=(str(place), name),
                )

    def _decide(self, letter: Letter, place: Place, record: r.DeadLetterSettled) -> None:
        letter.retried = place if record.action == "retry" else None
