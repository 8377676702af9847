"""What the trainer writes, each call in one transaction. Raises what Producer.transaction does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from laminar.operators.operator import Context
from laminar.schemas import records as r
from laminar.streams.dead_letter import send_letter
from laminar.streams.log import Membership, TopicPartition
from laminar.streams.topics import outgoing

__all__ = ["Writer"]


class Writer:
    """Construction fences a predecessor."""

    def __init__(self, context: Context) -> None:
        self._codec = context.codec
        self._group = context.group
        self._producer = context.log.producer(context.transactional_id)

    def write(self, *records: r.Record) -> None:
        """Some records."""
        with self._producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(self._codec, record))

    def write_at(self, record: r.Record, offsets: Mapping[TopicPartition, int]) -> None:
        """A record, and how far the trainer has read, for display: what it goes by stands in its checkpoint."""
        with self._producer.transaction() as tx:
            tx.send(outgoing(self._codec, record))
            tx.commit_offsets(Membership(self._group), offsets)

    def bury(self, letters: Sequence[r.DeadLetter]) -> None:
        """Dead letters."""
        with self._producer.transaction() as tx:
            for letter in letters:
                send_letter(tx, self._codec, letter)

    def close(self) -> None:
        """Release the transactional id."""
        self._producer.close()
