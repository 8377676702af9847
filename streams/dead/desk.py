"""Decisions about dead letters, each taken once.

Whoever decides takes the transactional id ``{run}.dead-letters`` first: that ends everybody else's decision, committed
or aborted, and from then on nobody else can decide. Then::

    1. read dead.letters until the newest decision is visible: the group {run}.dead-letters has committed, with each
       decision, how far its taker had read, so one must stand at or behind that offset (another producer's open
       transaction may hide it for a moment)
    2. a letter that is decided already stays so: say when and by whom
    3. one transaction {the original on its topic (retry), DeadLetterSettled, the group's offset}
    4. committed: done. Nobody knows: take the id again, which settles it, and go back to 1.
       Fenced: another person decides now; stop, and say so

So a retry happens once, whoever is killed or does it at the same time.

>>> with closing(Desk(log, codec, "run", by="ada@lab", deadline=deadline)) as desk:          # doctest: +SKIP
...     outcome = desk.retry(desk.register.find("0@17"))
>>> outcome.done
True
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import RecordTooLarge, Retryable
from laminar.streams.dead.original import Gone, retry_of
from laminar.streams.dead.register import Entry, Register
from laminar.streams.dead_letter import DEAD_LETTERS
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord, Membership, OutRecord, Producer, TopicPartition
from laminar.streams.reading import decoded, read_topic
from laminar.streams.topics import outgoing

__all__ = ["Desk", "Outcome", "read_letter"]

_WAIT_S = 0.1
_PAUSE_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one decision."""

    entry: Entry
    done: bool
    """Decided now."""
    as_wanted: bool
    """The letter's state is what was asked for, now or since before."""
    text: str
    """For a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """What the run has made of its members."""

    of: Mapping[str, str]
    """Member -> the surviving step, or the evaluation, that settled it."""
    run_has_ended: bool


class Desk:
    """See the module's docstring."""

    def __init__(
        self,
        log: Log,
        codec: Codec,
        run_id: str,
        *,
        by: str,
        deadline: Deadline,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes the id and reads what is there. Raises UnknownTopic, Retryable."""
        self._log = log
        self._codec = codec
        self._run_id = run_id
        self._id = f"{run_id}.dead-letters"
        self._by = by
        self._deadline = deadline
        self._clock = clock
        self._unseen = False
        """The last decision has been committed, but perhaps not been read."""
        self._resolved: Fates | None = None
        self._producer: Producer | None = None
        self.register = Register(log, codec)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def retry(self, entry: Entry) -> Outcome:
        """Put the original on its topic, once. Raises Gone, Fenced, Retryable."""
        return self._decide(entry, "retry")

    def drop(self, entry: Entry) -> Outcome:
        """Keep the letter as a fate for good. Raises Fenced, Retryable."""
        return self._decide(entry, "drop")

    def close(self) -> None:
        """Release the id."""
        if self._producer is not None:
            self._producer.close()
        self.register.close()

    def _decide(self, entry: Entry, action: r.SettleAction) -> Outcome:
        if entry.settled is not None:
            return self._already(entry, action)
        original = self._original(entry) if action == "retry" else None
        if self._unseen:
            self._read_on()
        while entry.settled is None:
            try:
                self._commit(entry, action, original)
            except RecordTooLarge as error:
                raise Gone(f"{entry.place}: the original does not fit on its topic any more: {error}") from error
            except Retryable as error:
                logger.warning("%s: not known yet whether it is decided, looking again: %s", entry.place, error)
                self._deadline.check()
                time.sleep(min(_PAUSE_S, self._deadline.remaining()))
                self._take_over()
        if (entry.settled.by, entry.settled.action) != (self._by, action):
            return self._already(entry, action)
        verb = {"retry": "retried", "drop": "dropped"}[action]
        return Outcome(
            entry=entry, done=True, as_wanted=True, text=f"{entry.place} {verb}{self._effect(entry, original)}"
        )

    def _commit(self, entry: Entry, action: r.SettleAction, original: OutRecord | None) -> None:
        letter = entry.letter
        marker = r.DeadLetterSettled(
            letter_partition=entry.partition,
            letter_offset=entry.offset,
            action=action,
            key=letter.key,
            group_id=letter.group_id,
            trajectory_ids=letter.trajectory_ids,
            by=self._by,
            at_ms=int(self._clock() * 1000),
        )
        where = TopicPartition(DEAD_LETTERS, entry.partition)
        assert self._producer is not None
        with self._producer.transaction() as tx:
            if original is not None:
                tx.send(original)
            tx.send(outgoing(self._codec, marker, partition=entry.partition))
            tx.commit_offsets(Membership(self._id), {where: self.register.position()[where]})
        entry.settled, self._unseen = marker, True

    def _already(self, entry: Entry, action: r.SettleAction) -> Outcome:
        assert entry.settled is not None
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.settled.at_ms / 1000))
        text = f"{entry.place} was {entry.state} at {at} UTC by {entry.settled.by}: nothing done"
        return Outcome(entry=entry, done=False, as_wanted=entry.settled.action == action, text=text)

    def _effect(self, entry: Entry, original: OutRecord | None) -> str:
        ids = ", ".join(entry.letter.trajectory_ids)
        if original is None:
            return f"; {ids} stay dead" if ids else "; no member is named in it"
        if original.topic == "trajectories.partial":
            return f": {ids} begins anew, repack gives it to a rollout"
        where = original.topic if original.partition is None else f"{original.topic}[{original.partition}]"
        return f": it stands on {where} again"

    def _original(self, entry: Entry) -> OutRecord:
        """What a retry writes. Raises Gone."""
        for trajectory_id in entry.letter.trajectory_ids:
            fate = self._fates().of.get(trajectory_id)
            if fate is not None:
                raise Gone(f"{entry.place}: {trajectory_id} has another fate already: {fate}")
        where = f"{DEAD_LETTERS}[{entry.partition}]@{entry.offset}"
        try:
            return retry_of(
                self._log,
                self._codec,
                read_letter(self._log, self._codec, entry, self._deadline),
                letter_place=where,
                at_ms=int(self._clock() * 1000),
                deadline=self._deadline,
            )
        except Gone as error:
            raise Gone(f"{entry.place}: {error}") from error

    @property
    def run_has_ended(self) -> bool:
        """What is retried waits until the run is resumed."""
        return self._fates().run_has_ended

    def _fates(self) -> Fates:
        if self._resolved is None:
            self._resolved = fates(self._log, self._codec, self._run_id, self._deadline)
        return self._resolved

    def _take_over(self) -> None:
        """Steps 0 and 1."""
        if self._producer is not None:
            self._producer.close()
        while True:
            try:
                self._producer = self._log.producer(self._id)
                break
            except Retryable:
                self._deadline.check()
                time.sleep(min(_PAUSE_S, self._deadline.remaining()))
        self._read_on()

    def _read_on(self) -> None:
        self.register.read(self._deadline)
        while hidden := self._hidden():
            self._deadline.check(
                f"a decision at or behind {hidden} is not visible yet: a transaction is open before it"
            )
            self.register.poll(min(_WAIT_S, self._deadline.remaining()))
        self._unseen = False

    def _hidden(self) -> str:
        """Where a decision must stand that is not visible yet."""
        for partition, read_to in self._log.committed(self._id, DEAD_LETTERS).items():
            marker = self.register.last_marker.get(partition, -1)
            if marker < read_to and self.register.starts.get(partition, 0) <= read_to:
                return f"{partition}@{read_to}"
        return ""


def read_letter(log: Log, codec: Codec, entry: Entry, deadline: Deadline) -> r.DeadLetter:
    """The letter with the bytes of its original. Raises Gone, DeadlineExceeded."""
    partition = TopicPartition(DEAD_LETTERS, entry.partition)
    for record in _from(log, partition, entry.offset, deadline):
        for _, event in decoded([record], codec):
            if record.offset == entry.offset and isinstance(event, r.DeadLetter):
                return event
        break
    raise Gone(f"{entry.place}: the letter is not there any more (retention)")


def _from(log: Log, partition: TopicPartition, offset: int, deadline: Deadline) -> list[LogRecord]:
    reader = log.reader()
    try:
        reader.assign({partition: offset})
        while True:
            polled = reader.poll(1, min(_WAIT_S, deadline.remaining()))
            if polled:
                return polled
            deadline.check(f"read {partition}@{offset}")
    finally:
        reader.close()


def fates(log: Log, codec: Codec, run_id: str, deadline: Deadline) -> Fates:
    """What ``training.steps`` says as of now. Raises DeadlineExceeded."""
    steps: list[tuple[str, r.TrainingStep]] = []
    found: dict[str, str] = {}
    ended = False
    for record, event in decoded(read_topic(log, "training.steps", deadline), codec):
        if getattr(event, "run_id", None) != run_id:
            continue
        if isinstance(event, r.TrainerStarted):
            steps = [s for s in steps if s[1].epoch >= event.epoch or s[1].step <= event.step]
            ended = False
        elif isinstance(event, r.TrainingStep):
            steps.append((record.where, event))
        elif isinstance(event, r.Evaluation):
            found.update({one.trajectory_id: f"{one.reason} at {record.where}" for one in event.resolved})
        elif isinstance(event, r.RunEnded):
            ended = True
    for where, step in steps:
        found.update(dict.fromkeys(step.trained, f"trained at {where}"))
        found.update({one.trajectory_id: f"dropped ({one.reason}) at {where}" for one in step.dropped})
    return Fates(of=found, run_has_ended=ended)
