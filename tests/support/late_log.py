"""A log on which one commit ends without an answer: it is done, but only once its producer's id is taken over.

That is what Kafka may do with a commit that timed out; readers do not see it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from laminar.schemas.errors import Unavailable
from laminar.streams.log import Log, Membership, OutRecord, TopicPartition

__all__ = ["LateLog"]


class LateLog:
    """The log, and its only producer. The first transaction with a record in it is the one."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sent: list[OutRecord] = []
        self._late = self._tried = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def producer(self, transactional_id: str) -> LateLog:
        """Take the id over."""
        self._producer = self._log.producer(transactional_id)
        if self._late:
            with self._producer.transaction() as tx:
                for record in self._sent:
                    tx.send(record)
            self._late = False
        return self

    @contextmanager
    def transaction(self, *, visible: bool = True) -> Iterator[Any]:
        """As Producer.transaction."""
        assert not self._late, "this transaction would settle the one before, which nobody has seen yet"
        if self._tried:
            with self._producer.transaction() as tx:
                yield tx
            return
        yield self
        self._late = self._tried = bool(self._sent)
        if self._late:
            raise Unavailable("no answer to the commit")

    def send(self, record: OutRecord) -> None:
        """Of the transaction that ends without an answer."""
        self._sent.append(record)

    def commit_offsets(self, membership: Membership, offsets: dict[TopicPartition, int]) -> None:
        """They do not matter."""

    def close(self) -> None:
        """Nothing is held."""
