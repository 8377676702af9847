"""What stands on ``dead.letters``: every letter with its state, without the bytes of its original.

A letter is ``open`` until somebody retries or drops it; of several decisions about one letter the first counts. Memory
follows the number of letters, not their size.

>>> register = Register(log, codec)                                                         # doctest: +SKIP
>>> register.read(Deadline.after(60, "read dead.letters"))                                  # doctest: +SKIP
>>> [entry.place for entry in register.entries.values() if entry.state == "open"]           # doctest: +SKIP
['0@17']
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError
from laminar.streams.dead_letter import DEAD_LETTERS, place_of
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, TopicPartition
from laminar.streams.reading import Decoder, Tail, decoded

__all__ = ["Entry", "Register", "State", "parse_place"]

State = Literal["open", "retried", "dropped"]

_BATCH = 100
"""Letters may be large; so many are in memory at once."""
_WAIT_S = 0.2


@dataclass(slots=True, eq=False)
class Entry:
    """One letter."""

    partition: int
    offset: int
    """Where it stands on ``dead.letters``."""
    letter: r.DeadLetter
    """Without value and headers."""
    n_bytes: int | None
    """Of the original's value; None: the letter does not hold it."""
    settled: r.DeadLetterSettled | None = None

    @property
    def place(self) -> str:
        """Where it stands, as a person names it: ``0@17``."""
        return place_of(self.partition, self.offset)

    @property
    def source(self) -> str:
        """Where its original stands; a letter about a trajectory names no record."""
        letter = self.letter
        if letter.offset < 0:
            return letter.topic
        return f"{letter.topic}[{letter.partition}]@{letter.offset}"

    @property
    def state(self) -> State:
        """What was decided."""
        if self.settled is None:
            return "open"
        return "retried" if self.settled.action == "retry" else "dropped"


class Register:
    """A fold of the topic, which can be brought up to date again and again."""

    def __init__(self, log: Log, codec: Decoder) -> None:
        """Raises UnknownTopic."""
        self.entries: dict[tuple[int, int], Entry] = {}
        """By partition and offset."""
        self.last_marker: dict[TopicPartition, int] = {}
        """Offset of the last decision on each partition."""
        self._codec = codec
        self._tail = Tail(log, [DEAD_LETTERS])
        self.starts: Mapping[TopicPartition, int] = self._tail.position()
        """The first readable offsets when the reading began."""

    def read(self, deadline: Deadline) -> None:
        """Take everything up to the end as it is now. Raises DeadlineExceeded."""
        at, behind = self._tail.position(), self._tail.behind()
        ends = {p: at[p] + behind[p] for p in at}
        while any(self._tail.position()[p] < end for p, end in ends.items()):
            deadline.check()
            self.poll(min(_WAIT_S, deadline.remaining()))

    def poll(self, timeout_s: float) -> None:
        """Take what is new."""
        for record, event in decoded(self._tail.poll(_BATCH, timeout_s), self._codec):
            if isinstance(event, r.DeadLetter):
                n_bytes = None if event.value is None else len(event.value)
                slim = replace(event, value=None, headers=())
                self.entries[record.partition, record.offset] = Entry(record.partition, record.offset, slim, n_bytes)
            elif isinstance(event, r.DeadLetterSettled):
                self.last_marker[record.source] = record.offset
                entry = self.entries.get((event.letter_partition, event.letter_offset))
                if entry is not None and entry.settled is None:
                    entry.settled = event

    def position(self) -> dict[TopicPartition, int]:
        """Everything below is folded."""
        return self._tail.position()

    def find(self, place: str) -> Entry:
        """The letter at this place. Raises ConfigError, naming what would be valid."""
        where = parse_place(place)
        entry = self.entries.get(where)
        if entry is not None:
            return entry
        near = sorted(self.entries, key=lambda p: (p[0] != where[0], abs(p[1] - where[1])))[:5]
        valid = ", ".join(place_of(*p) for p in sorted(near))
        hint = f"letters near it: {valid}" if near else f"there is none on {DEAD_LETTERS}"
        raise ConfigError(f"{place}: no dead letter stands there ({hint})")

    def close(self) -> None:
        """Release the reader."""
        self._tail.close()


def parse_place(text: str) -> tuple[int, int]:
    """Partition and offset from ``0@17``, ``17`` (of partition 0) or ``dead.letters[0]@17``. Raises ConfigError."""
    found = re.fullmatch(r"(?:dead\.letters\[(\d+)\]@|(\d+)@)?(\d+)", text)
    if found is None:
        raise ConfigError(f"{text}: not the place of a dead letter (valid: 0@17, as `laminar dead list` shows it)")
    return int(found[1] or found[2] or 0), int(found[3])
