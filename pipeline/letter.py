"""How dead letters are chosen and shown to a person."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from laminar.streams.dead import Entry

__all__ = ["Filter", "described", "dump", "line_of", "row_of"]

_ERROR_WIDTH = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which letters are meant; None: any."""

    topic: str | None
    operator: str | None
    kind: str | None
    state: str | None
    since_ms: int | None
    until_ms: int | None
    member: str | None

    @property
    def given(self) -> bool:
        """Whether it leaves anything out."""
        return any(getattr(self, name) is not None for name in self.__dataclass_fields__)

    def takes(self, entry: Entry) -> bool:
        """Whether the letter is meant."""
        letter = entry.letter
        return (
            self.topic in (None, letter.topic)
            and self.operator in (None, letter.operator)
            and self.kind in (None, letter.kind)
            and self.state in (None, entry.state)
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms < self.until_ms)
            and (self.member is None or self.member == letter.group_id or self.member in letter.trajectory_ids)
        )


def row_of(entry: Entry) -> dict[str, object]:
    """One line of the table."""
    letter = entry.letter
    source = entry.source if letter.offset >= 0 else _about(entry)
    first = (letter.error.splitlines() or [""])[0].removeprefix(f"{source}: ")
    return {
        "place": entry.place,
        "when": datetime.fromtimestamp(letter.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        "operator": letter.operator,
        "kind": letter.kind,
        "source": source,
        "tries": letter.attempt,
        "state": entry.state,
        "error": first if len(first) <= _ERROR_WIDTH else f"{first[: _ERROR_WIDTH - 3]}...",
    }


def _about(entry: Entry) -> str:
    return ", ".join(entry.letter.trajectory_ids) or entry.source


def line_of(entry: Entry) -> dict[str, Any]:
    """Everything but bytes and headers, for ``json.dumps``."""
    letter = entry.letter
    settled = entry.settled
    return {
        "place": entry.place,
        "at": datetime.fromtimestamp(letter.at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "operator": letter.operator,
        "kind": letter.kind,
        "error": letter.error,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "attempt": letter.attempt,
        "key": None if letter.key is None else letter.key.decode("utf-8", "replace"),
        "n_bytes": entry.n_bytes,
        "group_id": letter.group_id,
        "trajectory_ids": list(letter.trajectory_ids),
        "state": entry.state,
        "settled_by": None if settled is None else settled.by,
        "settled_at_ms": None if settled is None else settled.at_ms,
    }


def described(entry: Entry) -> Iterator[str]:
    """What the letter says, a line for each thing."""
    letter, settled = entry.letter, entry.settled
    at = datetime.fromtimestamp(letter.at_ms / 1000, UTC).isoformat(timespec="seconds")
    yield f"letter     {entry.place} of {at}"
    if settled is None:
        yield "state      open"
    else:
        at = datetime.fromtimestamp(settled.at_ms / 1000, UTC).isoformat(timespec="seconds")
        yield f"state      {entry.state} at {at} by {settled.by}"
    yield f"operator   {letter.operator}, after {letter.attempt} attempt{'s' if letter.attempt != 1 else ''}"
    first, *more = letter.error.splitlines() or [""]
    yield f"error      {letter.kind}: {first}"
    yield from (f"           {line}" for line in more)
    yield f"source     {entry.source}"
    yield f"key        {letter.key!r}" if letter.key is not None else "key        none"
    if letter.trajectory_ids:
        verb = "in flight again" if entry.state == "retried" else "dead"
        yield f"members    {', '.join(letter.trajectory_ids)}: {verb} by this letter"
    elif letter.group_id or letter.key:
        yield "members    none is named: the bytes did not say which"


def dump(data: bytes) -> Iterator[str]:
    """Bytes in hex and as text, 16 a line."""
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"  {start:08x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{text}|"
