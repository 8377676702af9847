"""The exactly-once loop for stateless operators: one function from input records to output records.

The function's author sees no offsets, no transactions and no Kafka. Every input record ends in exactly one committed
transaction, with its outputs or with its dead letter, and with the offset after it:

1. Poll: the member's sign of life, every step, however slow the function is.
2. Decode. Bytes that are no record become a dead letter; the others are handed to the worker.
3. Collect what the worker has finished. A function that raised is tried again, ``max_attempts`` times in all; then its
   input becomes a dead letter.
4. Choose, per partition, the finished records in front of the first unfinished one: offsets only ever advance over
   records that are done. A partition that holds many behind a slow one is paused; the other partitions go on.
5. One transaction {outputs, dead letters, next offsets}. An output above its topic's limit turns its input into a dead
   letter: no offset passes a lost output.
6. Committed: forget them. Aborted or Evicted: nothing is visible, so seek each partition that is still owned back to
   its first uncommitted record and drop what was in hand. A revoked partition's records are dropped likewise: they are
   the next owner's. Other errors fly: the runner restarts the process, whose new producer settles an unknown outcome.

>>> loop = Loop(log=log, codec=codec, name="upper", group="run.upper", transactional_id="run.upper-0",  # doctest: +SKIP
...             instance="upper-0", topics=["trajectories.completed"], worker=Inline(score))
>>> while loop.step(time.time()): pass                                                                  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.schemas.codec import Codec
from laminar.schemas.errors import Aborted, DecodeError, EncodeError, Evicted, LaminarError, RecordTooLarge
from laminar.schemas.records import Record
from laminar.streams.dead_letter import MAX_VALUE_BYTES, dead_letter
from laminar.streams.log import Log, LogRecord, OutRecord, TopicPartition
from laminar.streams.topics import outgoing
from laminar.streams.worker import Worker

__all__ = ["Counts", "Loop"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """What a loop has done since its start; committed work only, but for ``rewinds``."""

    records: int = 0
    outputs: int = 0
    dead: int = 0
    transactions: int = 0
    rewinds: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """One input record in hand."""

    source: LogRecord
    record: Record | None = None
    attempt: int = 0
    ticket: int = -1
    """-1: the worker does not have it."""
    outputs: list[OutRecord] = field(default_factory=list)
    done: bool = False
    dead: bool = False
    """Its only output is its dead letter."""
    bare: bool = False
    """The letter goes without the source's bytes: with them it was too large itself."""


class _Refused(Exception):
    """Leaves a transaction in order to abort it; never seen outside."""

    def __init__(self, entry: _Entry, error: RecordTooLarge) -> None:
        super().__init__(str(error))
        self.entry = entry
        self.error = error


class Loop:
    """An Operator (``laminar.operators.operator``). Construction fences a predecessor of the same id."""

    def __init__(
        self,
        *,
        log: Log,
        codec: Codec,
        name: str,
        group: str,
        instance: str,
        transactional_id: str,
        topics: Sequence[str],
        worker: Worker,
        max_in_hand: int = 64,
        max_attempts: int = 3,
        linger_s: float = 0.05,
        max_transaction_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        """``max_in_hand``: input records held at once, over all partitions (exceeded by less than one poll);
        ``linger_s``: how long finished records may wait for others to share their transaction."""
        self.counts = Counts()
        self._codec = codec
        self._name = name
        self._worker = worker
        self._max_in_hand = max_in_hand
        self._max_attempts = max_attempts
        self._linger_s = linger_s
        self._max_transaction_bytes = max_transaction_bytes
        self._in_hand: dict[TopicPartition, deque[_Entry]] = {}
        self._tickets: dict[int, _Entry] = {}
        self._next_ticket = 0
        self._paused: frozenset[TopicPartition] = frozenset()
        self._ready_since: float | None = None
        self._producer = log.producer(transactional_id)
        self._consumer = log.consumer(group, topics, instance=instance, on_revoke=self._revoked)

    @property
    def in_hand(self) -> int:
        """Input records polled and not yet committed."""
        return sum(map(len, self._in_hand.values()))

    def step(self, now: float) -> bool:
        """Steps 1 to 6 once. Raises Fenced, and Retryable when an outcome is not known."""
        polled = self._poll(now, draining=False)
        finished = self._collect(now)
        return self._commit_when_due(now) or polled or finished

    def drain(self, now: float) -> bool:
        """Take nothing new, finish what is in hand; True when it is committed."""
        self._poll(now, draining=True)
        self._collect(now)
        self._commit_when_due(now)
        return self.in_hand == 0

    def close(self) -> None:
        """Leave at once; what is in hand is the next owner's."""
        self._worker.close()
        self._consumer.close()
        self._producer.close()

    def _poll(self, now: float, *, draining: bool) -> bool:
        """Step 1: fill the hands, each partition up to its share, so that a slow one never takes all the room."""
        polled = False
        while True:
            owned = self._consumer.assignment()
            # Before anything is assigned: one record, or one partition could fill the hands for good.
            share = max(1, self._max_in_hand // len(owned)) if owned else 1
            closed = draining or self.in_hand >= self._max_in_hand
            self._pause(owned, frozenset(p for p in owned if closed or len(self._in_hand.get(p, ())) >= share))
            records = self._consumer.poll(share, timeout_s=0.0)
            for source in records:
                self._admit(source, now)
            polled = polled or bool(records)
            if not records or closed:
                return polled

    def _pause(self, owned: frozenset[TopicPartition], wanted: frozenset[TopicPartition]) -> None:
        """Pause exactly these of the owned partitions."""
        if wanted - self._paused:
            self._consumer.pause(wanted - self._paused)
        if self._paused - wanted:
            self._consumer.resume((self._paused - wanted) & owned)
        self._paused = wanted

    def _admit(self, source: LogRecord, now: float) -> None:
        entry = _Entry(source)
        self._in_hand.setdefault(source.source, deque()).append(entry)
        try:
            if source.value is None:
                raise DecodeError(f"{source.where}: no value")
            entry.record = self._codec.decode(source.value)
        except DecodeError as error:
            entry.attempt = 1
            self._bury(entry, error, now)
        else:
            self._submit(entry, entry.record)

    def _submit(self, entry: _Entry, record: Record) -> None:
        entry.attempt += 1
        entry.ticket = self._next_ticket
        self._next_ticket += 1
        self._tickets[entry.ticket] = entry
        self._worker.submit(entry.ticket, record)

    def _collect(self, now: float) -> bool:
        results = self._worker.collect()
        for result in results:
            entry = self._tickets.pop(result.ticket, None)
            if entry is None or entry.record is None:
                continue
            entry.ticket = -1
            error: Exception | None = result.error
            if error is None:
                try:
                    entry.outputs = [outgoing(self._codec, output) for output in result.outputs]
                    entry.done = True
                except EncodeError as refused:
                    error = refused
            if error is None:
                continue
            if entry.attempt < self._max_attempts:
                logger.warning("%s: attempt %d failed, trying again: %s", entry.source.where, entry.attempt, error)
                self._submit(entry, entry.record)
            else:
                self._bury(entry, error, now)
        return bool(results)

    def _bury(self, entry: _Entry, error: Exception, now: float, max_value_bytes: int = MAX_VALUE_BYTES) -> None:
        """The entry's only output is its dead letter."""
        logger.error("%s: dead letter after attempt %d: %s", entry.source.where, entry.attempt, error)
        letter = dead_letter(
            entry.source,
            error,
            operator=self._name,
            attempt=entry.attempt,
            at_ms=int(now * 1000),
            record=entry.record,
            max_value_bytes=max_value_bytes,
        )
        entry.outputs = [outgoing(self._codec, letter)]
        entry.done = entry.dead = True

    def _ready(self) -> dict[TopicPartition, list[_Entry]]:
        """Step 4, within the bytes of one transaction (but always at least one record)."""
        ready: dict[TopicPartition, list[_Entry]] = {}
        size = 0
        for partition, entries in self._in_hand.items():
            for entry in entries:
                size += sum(len(output.value or b"") for output in entry.outputs)
                if not entry.done or (ready and size > self._max_transaction_bytes):
                    break
                ready.setdefault(partition, []).append(entry)
        return ready

    def _commit_when_due(self, now: float) -> bool:
        ready = self._ready()
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        count = sum(map(len, ready.values()))
        if self._tickets and count < self._max_in_hand // 2 and now - self._ready_since < self._linger_s:
            return False
        self._ready_since = None
        try:
            self._commit(ready)
        except _Refused as refused:
            self._refuse(refused.entry, refused.error, now)
        except (Aborted, Evicted) as error:
            self._rewind(error)
        return True

    def _commit(self, ready: dict[TopicPartition, list[_Entry]]) -> None:
        with self._producer.transaction() as transaction:
            for entries in ready.values():
                for entry in entries:
                    for output in entry.outputs:
                        try:
                            transaction.send(output)
                        except RecordTooLarge as error:
                            raise _Refused(entry, error) from error
            offsets = {partition: entries[-1].source.offset + 1 for partition, entries in ready.items()}
            transaction.commit_offsets(self._consumer.membership(), offsets)
        self.counts.transactions += 1
        for partition, entries in ready.items():
            for entry in entries:
                self._in_hand[partition].popleft()
                self.counts.records += 1
                self.counts.dead += entry.dead
                self.counts.outputs += 0 if entry.dead else len(entry.outputs)

    def _refuse(self, entry: _Entry, error: RecordTooLarge, now: float) -> None:
        """An output was too large: a dead letter in its place; if the letter is, one without the source's bytes."""
        if entry.bare:
            raise error
        entry.bare = entry.dead
        self._bury(entry, error, now, max_value_bytes=0 if entry.bare else MAX_VALUE_BYTES)

    def _rewind(self, error: LaminarError) -> None:
        logger.warning("%s: rewinding %d records: %s", self._name, self.in_hand, error)
        self.counts.rewinds += 1
        owned = self._consumer.assignment()
        first = {partition: entries[0].source.offset for partition, entries in self._in_hand.items() if entries}
        self._drop(frozenset(first))  # the consumer still has them paused, as _paused says
        for partition, offset in first.items():
            if partition in owned:
                self._consumer.seek(partition, offset)

    def _revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._drop(partitions)
        self._paused -= partitions

    def _drop(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in partitions:
            for entry in self._in_hand.pop(partition, ()):
                if self._tickets.pop(entry.ticket, None) is not None:
                    self._worker.cancel(entry.ticket)
