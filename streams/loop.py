"""The exactly-once loop for stateless operators: one function from input records to output records.

The function's author sees no offsets, no transactions and no Kafka. Every input record ends in exactly one committed
transaction, with its outputs or with its dead letter, and with the offset after it:

1. Poll: the member's sign of life, every step, however slow the function is. What is in hand is bounded in records and
   in bytes, and each partition has its share of both: one that holds many behind a slow record is paused, the others
   go on.
2. Decode. Bytes that are no record become a dead letter; the others are handed to the worker.
3. Collect what the worker has finished. A function that raised is tried again, ``max_attempts`` times in all; then its
   input becomes a dead letter.
4. Choose, per partition, the finished records in front of the first unfinished one (``hand.py``).
5. One transaction {outputs, dead letters, next offsets}. An output above its topic's limit turns its input into a dead
   letter: no offset passes a lost output.
6. Committed: forget them. Not committed (Aborted, Evicted), or nobody knows (no answer): everything stays in hand,
   nothing is polled, and no transaction is opened until the group's own committed offsets have said what became of it.
   An outcome that nobody knows is first settled by taking the transactional id anew. Then what was committed is
   forgotten, and what was not goes into the next transaction, as it is: finished work is never done twice. An outage
   that lasts longer than ``outage_s`` is raised, for the supervisor. Fenced flies: another process is this one now.
   With ``background`` the transaction is made beside the step, one at a time: what became of it is learned by a later
   step, while polling and calls go on.
7. Partitions are revoked: wait for the transaction that is being made, commit what is finished of them, waiting at
   most ``revoke_s`` for more, and drop the rest: it is the next owner's. Partitions that are lost already are dropped
   at once.

>>> loop = Loop(log=log, codec=codec, name="upper", group="run.upper", transactional_id="run.upper-0",  # doctest: +SKIP
...             instance="upper-0", topics=["trajectories.completed"], worker=Inline(score))
>>> while loop.step(time.time()): pass                                                                  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.schemas.codec import Codec
from laminar.schemas.errors import Aborted, Evicted, OffsetOutOfRange, RecordTooLarge, Retryable
from laminar.streams.background import Background, Call
from laminar.streams.calls import Calls
from laminar.streams.deadline import Deadline
from laminar.streams.hand import Batch, Entry, Hand
from laminar.streams.log import Log, Membership, Producer, TopicPartition
from laminar.streams.skip import LostOffsets, skip_lost
from laminar.streams.worker import Worker

__all__ = ["Counts", "Loop"]

logger = logging.getLogger(__name__)

_COMMIT_S = 2.0
"""For the transaction of a revocation, whatever its waiting has used up."""
_QUICK_S = 0.1
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 1.0
_UNKNOWN_S = 0.5
"""After an unknown outcome: a process that was replaced hears so from its group, before it takes the id back."""


@dataclass(slots=True)
class Counts:
    """What a loop has done since its start; committed work only, but for ``rewinds``."""

    records: int = 0
    outputs: int = 0
    dead: int = 0
    transactions: int = 0
    rewinds: int = 0
    """Transactions that did not commit, or of which nobody knew; what they held went into later ones."""
    skipped: int = 0
    """Offsets jumped over, as ``on_lost_offsets`` allows."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transaction that is being made beside the steps."""

    batch: Batch
    began: float
    """By the stopwatch."""
    call: Call


@dataclass(slots=True)
class _Unsettled:
    """A transaction of which it is not known yet whether it has committed."""

    again: float
    """When to ask."""
    known: bool
    """It did not commit, for certain; the producer can go on."""


class _Refused(Exception):
    """Leaves a transaction in order to abort it; never seen outside."""

    def __init__(self, entry: Entry, error: RecordTooLarge) -> None:
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
        max_in_hand: int = 1024,
        max_in_hand_bytes: int = 64 * 1024 * 1024,
        max_attempts: int = 3,
        linger_s: float = 0.05,
        max_transaction_bytes: int = 64 * 1024 * 1024,
        revoke_s: float = 2.0,
        outage_s: float = 120.0,
        on_lost_offsets: LostOffsets = "stop",
        stopwatch: Callable[[], float] = time.monotonic,
        background: Background | None = None,
    ) -> None:
        """
        :param max_in_hand: input records held at once, over all partitions (exceeded by less than one poll)
        :param max_in_hand_bytes: their encoded bytes (exceeded by less than one poll); decoded records and outputs
            come on top, so the memory is about three times this
        :param linger_s: how long finished records may wait for others to share their transaction
        :param max_transaction_bytes: of outputs; a transaction that was not committed in time makes the next ones
            smaller, until they are quick again
        :param revoke_s: how long a revocation may wait for calls in hand to end; keep it below the poll interval
        :param outage_s: raise the error when no transaction has committed for so long, since the first that did not
        :param on_lost_offsets: ``stop`` raises OffsetOutOfRange with both offsets; ``jump`` goes on with the first
            record that is left, and says so by an OffsetsSkipped on ``dead.letters``
        :param stopwatch: seconds, for how long a transaction took
        :param background: makes transactions beside the step; the log's producers must bear another thread than its
            consumers (Kafka's do)
        """
        self.counts = Counts()
        self._log = log
        self._codec = codec
        self._name = name
        self._group = group
        self._transactional_id = transactional_id
        self._max_in_hand = max_in_hand
        self._max_in_hand_bytes = max_in_hand_bytes
        self._linger_s = linger_s
        self._max_transaction_bytes = self._room = max_transaction_bytes
        self._too_long_s = 0.0
        self._revoke_s = revoke_s
        self._outage_s = outage_s
        self._on_lost_offsets = on_lost_offsets
        self._stopwatch = stopwatch
        self._background = background
        self._flight: _Flight | None = None
        self._hand = Hand()
        self._to_begin: deque[Entry] = deque()
        """In hand, and not yet begun."""
        self._calls = Calls(worker, codec, operator=name, max_attempts=max_attempts)
        self._paused: frozenset[TopicPartition] = frozenset()
        self._ready_since: float | None = None
        self._unsettled: _Unsettled | None = None
        self._failures = 0
        self._failing_since = 0.0
        self._now = 0.0
        self._producer: Producer | None = log.producer(transactional_id)
        self._consumer = log.consumer(group, topics, instance=instance, on_revoke=self._revoked)

    @property
    def in_hand(self) -> int:
        """Input records polled and not yet committed."""
        return self._hand.count

    def step(self, now: float) -> bool:
        """Steps 1 to 6 once. Raises Fenced, OffsetOutOfRange, and Retryable after an outage."""
        polled = self._poll(now, draining=False)
        finished = self._calls.collect(now)
        return self._commit_when_due(now) or polled or finished

    def drain(self, now: float) -> bool:
        """Take nothing new, finish what is in hand; True when it is committed."""
        self._poll(now, draining=True)
        self._calls.collect(now)
        self._commit_when_due(now)
        return self.in_hand == 0 and self._unsettled is None and self._flight is None

    def close(self) -> None:
        """Leave at once; what is in hand is the next owner's."""
        self._calls.close()
        self._consumer.close()
        ended = self._flight is None or self._flight.call.wait(_COMMIT_S)
        if self._producer is not None and ended:
            self._producer.close()

    def _poll(self, now: float, *, draining: bool) -> bool:
        """Step 1: fill the hands, each partition up to its share, so that a slow one never takes all the room."""
        polled = False
        self._now = now
        self._begin(now)
        while True:
            owned = self._consumer.assignment()
            # Before anything is assigned: one record, or one partition could fill the hands for good.
            share = max(1, self._max_in_hand // len(owned)) if owned else 1
            size = self._max_in_hand_bytes // max(1, len(owned))
            hand = self._hand
            full = hand.count >= self._max_in_hand or hand.bytes >= self._max_in_hand_bytes
            closed = draining or full or self._unsettled is not None
            self._pause(owned, owned if closed else frozenset(p for p in owned if hand.holds(p, share, size)))
            try:
                records = self._consumer.poll(share, timeout_s=0.0)
            except OffsetOutOfRange:
                if self._on_lost_offsets == "stop" or not self._jump(now):
                    raise
                return True
            entries = [Entry(source.source, source.offset + 1, source) for source in records]
            for entry in entries:
                self._hand.add(entry)
            self._to_begin.extend(entries)
            self._begin(now)
            polled = polled or bool(records)
            if not records or closed:
                return polled

    def _begin(self, now: float) -> None:
        """Hand what was polled to the worker. A registry that does not answer raises: then from there on next time."""
        while self._to_begin:
            self._calls.begin(self._to_begin[0], now)
            self._to_begin.popleft()

    def _pause(self, owned: frozenset[TopicPartition], wanted: frozenset[TopicPartition]) -> None:
        """Pause exactly these of the owned partitions."""
        if wanted == self._paused:
            return
        if wanted - self._paused:
            self._consumer.pause(wanted - self._paused)
        if self._paused - wanted:
            self._consumer.resume((self._paused - wanted) & owned)
        self._paused = wanted

    def _jump(self, now: float) -> bool:
        """Go on behind the records that are gone; the jump is committed in its turn."""
        jumps = skip_lost(self._log, self._consumer, self._codec, operator=self._name, group=self._group, now=now)
        for entry in jumps:
            self._hand.add(entry)
        return bool(jumps)

    def _commit_when_due(self, now: float) -> bool:
        if self._flight is not None:
            return self._land(self._flight, now)
        if self._unsettled is not None:
            return self._settle(self._unsettled, now)
        batch = self._hand.ready(self._room)
        if not batch.entries:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        enough = 2 * len(batch.entries) >= self._max_in_hand or 2 * batch.input_bytes >= self._max_in_hand_bytes
        if len(self._calls) and not enough and now - self._ready_since < self._linger_s:
            return False
        self._ready_since = None
        self._try(batch, now)
        return True

    def _try(self, batch: Batch, now: float, timeout_s: float | None = None) -> None:
        """Step 5, here or beside the step; with a timeout always here."""
        producer = self._producer
        if producer is None or self._flight is not None:
            raise AssertionError("unsettled: no transaction may be opened")
        membership, began = self._consumer.membership(), self._stopwatch()
        if self._background is not None and timeout_s is None:
            call = self._background(lambda: _write(producer, batch, membership, None))
            self._flight = _Flight(batch, began, call)
        else:
            self._conclude(batch, began, now, lambda: _write(producer, batch, membership, timeout_s))

    def _land(self, flight: _Flight, now: float) -> bool:
        """Whether the transaction beside the steps has ended; then with its consequences."""
        if not flight.call.done():
            return False
        self._flight = None
        self._conclude(flight.batch, flight.began, now, flight.call.result)
        return True

    def _conclude(self, batch: Batch, began: float, now: float, outcome: Callable[[], None]) -> None:
        try:
            outcome()
        except _Refused as refused:
            self._calls.refuse(refused.entry, refused.error, now)
        except Retryable as error:
            self._failed(batch, error, now, self._stopwatch() - began)
        else:
            self.counts.transactions += 1
            self._forget(batch.offsets)
            self._failures = 0
            quick = self._stopwatch() - began <= max(_QUICK_S, self._too_long_s / 4)
            if quick and self._room < self._max_transaction_bytes:
                self._room = min(self._max_transaction_bytes, 2 * self._room)

    def _failed(self, batch: Batch, error: Retryable, now: float, took_s: float) -> None:
        """Step 6. Nothing is forgotten, and no transaction opened, before the group's offsets have been asked."""
        known = isinstance(error, Aborted | Evicted)
        logger.warning("%s: transaction of %d records: %s", self._name, len(batch.entries), error)
        self.counts.rewinds += 1
        if not self._failures:
            self._failing_since = now
        elif now - self._failing_since >= self._outage_s:
            raise error
        wait_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2**self._failures) if self._failures else 0.0
        self._failures = min(self._failures + 1, 16)
        if not known:
            self._room = max(1, batch.output_bytes // 2)
            self._too_long_s = took_s
            wait_s = max(wait_s, _UNKNOWN_S)
        self._unsettled = _Unsettled(again=now + wait_s, known=known)

    def _settle(self, unsettled: _Unsettled, now: float) -> bool:
        """Whether it is settled now."""
        if now < unsettled.again:
            return False
        try:
            if not unsettled.known:
                if self._producer is not None:
                    self._producer.close()
                    self._producer = None
                self._producer = self._log.producer(self._transactional_id)
                unsettled.known = True
            committed = self._consumer.committed()
        except Retryable as error:
            if now - self._failing_since >= self._outage_s:
                raise
            logger.warning("%s: not settled yet: %s", self._name, error)
            unsettled.again = now + _BACKOFF_MAX_S
            return False
        self._unsettled = None
        self._forget(committed)
        return True

    def _forget(self, committed: dict[TopicPartition, int]) -> None:
        for entry in self._hand.forget(committed):
            self.counts.records += entry.source is not None
            self.counts.dead += entry.dead
            self.counts.skipped += entry.skipped
            self.counts.outputs += 0 if entry.dead or entry.source is None else len(entry.outputs)

    def _revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Step 7, inside a poll. What this raises, the poll raises."""
        deadline = Deadline.after(self._revoke_s, f"{self._name}: work on revoked partitions ends")
        ours = partitions & self._consumer.assignment()
        if ours and self._flight is not None:
            self._flight.call.wait(deadline.remaining() + _COMMIT_S)
            self._land(self._flight, self._now)
        while ours and self._unsettled is None and self._flight is None:
            unfinished = any(not entry.done for entry in self._hand.of(ours))
            if unfinished and not deadline.passed:
                if not self._calls.collect(self._now):
                    time.sleep(min(0.005, deadline.remaining()))
                continue
            batch = self._hand.ready(self._room, ours)
            if not batch.entries:
                break
            self._try(batch, self._now, deadline.remaining() + _COMMIT_S)
        self._calls.cancel(self._hand.drop(partitions))
        self._paused -= partitions


def _write(producer: Producer, batch: Batch, membership: Membership, timeout_s: float | None) -> None:
    """The transaction itself. Raises _Refused, and what Producer.transaction does."""
    with producer.transaction(timeout_s) as transaction:
        for entry in batch.entries:
            for output in entry.outputs:
                try:
                    transaction.send(output)
                except RecordTooLarge as error:
                    raise _Refused(entry, error) from error
        transaction.commit_offsets(membership, batch.offsets)
