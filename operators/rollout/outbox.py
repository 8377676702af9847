"""What a rollout has decided and not yet committed: envelopes of records, first in, first out.

An envelope's records are committed in one transaction. An envelope stays until its commit succeeded, so an aborted
transaction loses nothing, and leaves the moment it did, so nothing is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.operators.rollout.ledger import Owned
from laminar.schemas.errors import RecordTooLarge
from laminar.streams.log import OutRecord, Producer

__all__ = ["Envelope", "Outbox", "Refused", "Writing"]


@dataclass(slots=True, eq=False)
class Envelope:
    """Records about one trajectory that belong together."""

    owned: Owned
    records: Sequence[OutRecord]
    n_bytes: int
    """Size of the values."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An envelope that can never be written."""

    owned: Owned
    error: RecordTooLarge


class _TooLarge(Exception):
    """Leaves a transaction in order to abort it; never seen outside."""

    def __init__(self, envelope: Envelope, error: RecordTooLarge) -> None:
        super().__init__(str(error))
        self.envelope = envelope
        self.error = error


@dataclass(frozen=True, slots=True)
class Writing:
    """One transaction."""

    batch: Sequence[Envelope]
    also: Sequence[OutRecord]
    is_last: bool
    """Nothing was behind it when it was begun."""

    def make(self, producer: Producer) -> None:
        """Raises what a transaction raises. Touches nothing else, so it may run beside the step."""
        with producer.transaction(visible=False) as tx:
            for envelope in self.batch:
                try:
                    for record in envelope.records:
                        tx.send(record)
                except RecordTooLarge as error:
                    raise _TooLarge(envelope, error) from error
            for record in self.also:
                tx.send(record)


class Outbox:
    """See the module's docstring."""

    def __init__(self, max_transaction_bytes: int = 32 * 1024 * 1024) -> None:
        self._queue: deque[Envelope] = deque()
        self._max_bytes = max_transaction_bytes
        self._refused: list[Refused] = []
        self.n_bytes = 0
        self.since = 0.0
        """When the oldest envelope came, epoch seconds."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, owned: Owned, records: Sequence[OutRecord], now: float) -> None:
        """Queue an envelope."""
        if not self._queue:
            self.since = now
        n_bytes = sum(len(record.value or b"") for record in records)
        self._queue.append(Envelope(owned, records, n_bytes))
        self.n_bytes += n_bytes

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self._refused.clear()
        self.n_bytes = 0

    def flush(self, producer: Producer, also: Sequence[OutRecord] = ()) -> None:
        """Commit everything, and ``also`` in the last transaction. Sets aside what is above a topic's size limit.

        Raises what a transaction raises; what was not committed is still here.
        """
        while (writing := self.begin(also)) is not None:
            if self.conclude(writing, lambda: writing.make(producer)) and writing.is_last:
                return

    def begin(self, also: Sequence[OutRecord] = ()) -> Writing | None:
        """The next transaction, to be made and concluded before another one; None: there is nothing to write."""
        batch = self._batch()
        if not batch and not also:
            return None
        is_last = len(batch) == len(self._queue)
        return Writing(batch, also if is_last else (), is_last)

    def conclude(self, writing: Writing, outcome: Callable[[], None]) -> bool:
        """Whether it was committed, as ``outcome`` says by raising or not. False: less is to be written now.

        Raises what a transaction raises; what was not committed is still here.
        """
        try:
            outcome()
        except _TooLarge as refused:
            if self._remove([refused.envelope]):
                self._refused.append(Refused(refused.envelope.owned, refused.error))
            return False
        self._remove(writing.batch)
        return True

    def take_refused(self) -> list[Refused]:
        """What was set aside since the last call, also by a flush that raised."""
        refused, self._refused = self._refused, []
        return refused

    def _remove(self, envelopes: Sequence[Envelope]) -> bool:
        """Whether they were still here: they may have been forgotten since."""
        found = False
        for envelope in envelopes:
            if self._queue and self._queue[0] is envelope:
                self._queue.popleft()
            elif envelope in self._queue:
                self._queue.remove(envelope)
            else:
                continue
            self.n_bytes -= envelope.n_bytes
            found = True
        return found

    def _batch(self) -> list[Envelope]:
        """The first envelopes, as many as one transaction should carry."""
        taken: list[Envelope] = []
        size = 0
        for envelope in self._queue:
            size += envelope.n_bytes
            if taken and size > self._max_bytes:
                break
            taken.append(envelope)
        return taken
