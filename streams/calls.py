"""The author's function, as the exactly-once loop (``loop.py``) calls it: attempts, outputs, dead letters.

What ends an entry: outputs that encode; or, after ``max_attempts`` failures, its dead letter. Bytes that are no record
are a dead letter at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError, EncodeError, RecordTooLarge
from laminar.schemas.records import DeadLetter, Record
from laminar.streams.dead_letter import DEAD_LETTERS, bare, dead_letter
from laminar.streams.hand import Entry
from laminar.streams.topics import outgoing
from laminar.streams.worker import Worker

__all__ = ["Calls"]

logger = logging.getLogger(__name__)


class Calls:
    """Calls in flight, and how they end."""

    def __init__(self, worker: Worker, codec: Codec, *, operator: str, max_attempts: int) -> None:
        """``operator``: its name, for dead letters."""
        self._worker = worker
        self._codec = codec
        self._operator = operator
        self._max_attempts = max_attempts
        self._open: dict[int, Entry] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    def begin(self, entry: Entry, now: float) -> None:
        """Decode and call; or bury."""
        try:
            record = self._decoded(entry)
        except DecodeError as error:
            entry.attempt = 1
            self._bury(entry, error, now)
        else:
            self._submit(entry, record)

    def collect(self, now: float) -> bool:
        """End what the worker has finished; True when it had something."""
        results = self._worker.collect()
        for result in results:
            entry = self._open.pop(result.ticket, None)
            if entry is None or entry.record is None:
                continue
            entry.ticket = -1
            error: Exception | None = result.error
            if error is None:
                try:
                    source = entry.source.value if entry.source else None
                    decoded = None if source is None else (entry.record, source)
                    entry.finish([outgoing(self._codec, output, decoded=decoded) for output in result.outputs])
                    continue
                except EncodeError as refused:
                    error = refused
            if entry.attempt < self._max_attempts:
                where = entry.source.where if entry.source else entry.partition
                logger.warning("%s: attempt %d failed, trying again: %s", where, entry.attempt, error)
                self._submit(entry, entry.record)
            else:
                self._bury(entry, error, now)
        return bool(results)

    def refuse(self, entry: Entry, error: RecordTooLarge, now: float) -> None:
        """An output was too large: a dead letter in its place; if the letter is, one without the source's bytes."""
        if entry.bare:
            raise error
        if entry.dead:
            letter = self._codec.decode(entry.outputs[0].value or b"")
            assert isinstance(letter, DeadLetter)
            entry.bare = True
            entry.finish([outgoing(self._codec, bare(letter))])
            return
        with suppress(DecodeError):
            entry.record = self._decoded(entry)
        self._bury(entry, error, now)

    def cancel(self, entries: Iterable[Entry]) -> None:
        """Forget the calls of these."""
        for entry in entries:
            if self._open.pop(entry.ticket, None) is not None:
                self._worker.cancel(entry.ticket)

    def close(self) -> None:
        """Forget all."""
        self._worker.close()

    def _decoded(self, entry: Entry) -> Record:
        value = entry.source.value if entry.source else None
        if value is None:
            raise DecodeError(f"{entry.source.where if entry.source else entry.partition}: no value")
        return self._codec.decode(value)

    def _submit(self, entry: Entry, record: Record) -> None:
        entry.record = record
        entry.attempt += 1
        entry.ticket = self._next_ticket
        self._next_ticket += 1
        self._open[entry.ticket] = entry
        self._worker.submit(entry.ticket, record)

    def _bury(self, entry: Entry, error: Exception, now: float) -> None:
        """The entry's only output is its dead letter. There are no letters about letters: they would never end."""
        if entry.source is None:
            raise error
        logger.error("%s: dead letter after attempt %d: %s", entry.source.where, entry.attempt, error)
        letter = dead_letter(
            entry.source,
            error,
            operator=self._operator,
            attempt=entry.attempt,
            at_ms=int(now * 1000),
            record=entry.record,
        )
        if entry.source.topic == DEAD_LETTERS:
            entry.finish([])
        else:
            entry.finish([outgoing(self._codec, letter)])
        entry.dead = True
