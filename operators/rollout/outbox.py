"""What a rollout has decided and not yet committed: envelopes of records, first in, first out.

An envelope's records are committed in one transaction. An envelope stays until its commit succeeded, so an aborted
transaction loses nothing, and leaves the moment it did, so nothing is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.operators.rollout.ledger import Owned
from laminar.schemas.errors import RecordTooLarge
from laminar.streams.log import OutRecord, Producer

__all__ = ["Envelope", "Outbox", "Refused"]


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
        while True:
            batch = self._batch()
            last = len(batch) == len(self._queue)
            if not batch and not also:
                return
            current: Envelope | None = None
            try:
                with producer.transaction() as tx:
                    for current in batch:
                        for record in current.records:
                            tx.send(record)
                    current = None
                    for record in also if last else ():
                        tx.send(record)
            except RecordTooLarge as error:
                if current is None:
                    raise
                self._queue.remove(current)
                self.n_bytes -= current.n_bytes
                self._refused.append(Refused(current.owned, error))
                continue
            for envelope in batch:
                self._queue.popleft()
                self.n_bytes -= envelope.n_bytes
            if last:
                return

    def take_refused(self) -> list[Refused]:
        """What was set aside since the last call, also by a flush that raised."""
        refused, self._refused = self._refused, []
        return refused

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
