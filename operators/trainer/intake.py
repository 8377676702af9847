"""What the trainer reads: scored trajectories and dead letters from its own offsets, and the run's events.

A record on ``trajectories.scored`` that cannot be decoded becomes a dead letter and stops nothing. Dead letters come
before the scored trajectories of the same poll, up to the end that ``dead.letters`` had after these were read: that a
letter was retried is known before the result of the retry, whatever the order in which a broker answers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from laminar.operators.operator import Context
from laminar.operators.trainer.batch import Arrival, Death, Event, Retry
from laminar.schemas import records as r
from laminar.schemas.errors import DecodeError, OffsetOutOfRange
from laminar.streams.dead_letter import DEAD_LETTERS, dead_letter, place_of
from laminar.streams.deadline import Deadline
from laminar.streams.log import LogRecord, TopicPartition
from laminar.streams.reading import decoded, partitions_of

__all__ = ["DEAD", "SCORED", "STEPS", "Intake", "Taken"]

SCORED = "trajectories.scored"
DEAD = DEAD_LETTERS
STEPS = "training.steps"

_LETTERS_S = 10.0
_LETTERS = 256
_GROUP_ID = re.compile(rb"[^/\s]+/\d+/\d+")
_EVAL = "eval-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one poll brought."""

    n_records: int
    events: tuple[Event, ...]
    """For the assembly, in the order read."""
    others: tuple[r.Record, ...]
    """Records of ``training.steps``."""
    letters: tuple[r.DeadLetter, ...]
    """To be written: what could not be decoded."""


class Intake:
    """A reader over exactly the partitions that the trainer needs."""

    def __init__(self, context: Context, positions: Mapping[TopicPartition, int], *, steps_from: int) -> None:
        """Read from ``positions`` (0 where there is none), and ``training.steps`` from ``steps_from``.

        Raises OffsetOutOfRange, with both offsets, when retention has passed a position: trajectories would be missing.
        """
        self._context = context
        self._warned = False
        self._reader = context.log.reader()
        wanted = {p: positions.get(p, 0) for topic in (SCORED, DEAD) for p in partitions_of(context.log, topic)}
        for partition, offset in wanted.items():
            bounds = self._reader.bounds(partition)
            if offset < bounds.start:
                raise OffsetOutOfRange(
                    f"{partition}: the trainer needs offset {offset}, but the log begins at {bounds.start};"
                    f" what lies between was never trained on (retention is too short)"
                )
        self._letters = context.log.reader()
        self._letters.assign({p: offset for p, offset in wanted.items() if p.topic == DEAD})
        self._reader.assign(
            {**{p: offset for p, offset in wanted.items() if p.topic == SCORED}, TopicPartition(STEPS, 0): steps_from}
        )

    def poll(self, max_records: int, now: float) -> Taken:
        """What is there now. Waits for nothing but dead letters that are in the log already.

        Raises OffsetOutOfRange, Retryable.
        """
        # By age over all partitions, so that no partition's groups are preferred.
        polled = sorted(self._reader.poll(max_records, 0.0), key=lambda record: record.timestamp_ms)
        events: list[Event] = []
        letters: list[r.DeadLetter] = []
        scored = [record for record in polled if record.topic == SCORED]
        read = self._read_letters(to_the_end=bool(scored))
        for record, letter in decoded(read, self._context.codec):
            events.extend(_events(letter, record))
        for record in scored:
            try:
                arrived = self._context.codec.decode(record.value or b"")
                if not isinstance(arrived, r.ScoredTrajectory):
                    raise DecodeError(f"a {type(arrived).__name__} does not belong on {SCORED}")
            except DecodeError as error:
                logger.warning("%s: dead letter: %s", record.where, error)
                letters.append(
                    dead_letter(record, error, operator=self._context.name, attempt=1, at_ms=int(now * 1000))
                )
            else:
                self._look_at(arrived.trajectory.prompt)
                events.append(
                    Arrival(scored=arrived, source=record.source, offset=record.offset, value=record.value or b"")
                )
        others = tuple(event for _, event in decoded((x for x in polled if x.topic == STEPS), self._context.codec))
        return Taken(len(polled) + len(read), tuple(events), others, tuple(letters))

    def position(self) -> dict[TopicPartition, int]:
        """Next offset of each partition that a checkpoint must remember."""
        scored = {p: offset for p, offset in self._reader.position().items() if p.topic != STEPS}
        return {**scored, **self._letters.position()}

    def close(self) -> None:
        """Release the readers."""
        self._reader.close()
        self._letters.close()

    def _look_at(self, prompt: r.Prompt) -> None:
        """Warn once of sampling that the loss cannot follow (E4)."""
        how = prompt.sampling
        if self._warned or prompt.purpose != "train" or not (how.top_p < 1 or how.top_k or how.min_p > 0):
            return
        self._warned = True
        logger.warning(
            "%s: sampled with top_p %g, top_k %d, min_p %g: its logprobs are of what was left of the vocabulary, the"
            " trainer's are of all of it, so importance ratios are too small (prompts.sampling: 1, 0 and 0 agree)",
            prompt.prompt_id,
            how.top_p,
            how.top_k,
            how.min_p,
        )

    def _read_letters(self, *, to_the_end: bool) -> list[LogRecord]:
        read = self._letters.poll(_LETTERS, 0.0)
        if not to_the_end:
            return read
        ends = {p: self._letters.bounds(p).end for p in self._letters.position()}
        deadline = Deadline.after(_LETTERS_S, f"trainer reads {DEAD} to its end")
        while any(self._letters.position()[p] < end for p, end in ends.items()):
            deadline.check()
            read += self._letters.poll(_LETTERS, min(0.1, deadline.remaining()))
        return read


def _events(letter: r.Record, record: LogRecord) -> Iterator[Event]:
    if isinstance(letter, r.DeadLetterSettled) and letter.action == "retry":
        yield Retry(
            source=TopicPartition(DEAD, letter.letter_partition),
            offset=letter.letter_offset,
            trajectory_ids=letter.trajectory_ids,
        )
    elif isinstance(letter, r.DeadLetter):
        if letter.trajectory_ids:
            yield from _deaths(letter, record)
        elif letter.topic in ("trajectories.completed", SCORED) and _GROUP_ID.fullmatch(letter.key or b""):
            yield _unnamed((letter.key or b"").decode(), record)


def _unnamed(group_id: str, record: LogRecord) -> Death:
    """One member of this group; which one, the bytes did not tell (of an evaluation prompt there is only one)."""
    known = group_id.startswith(_EVAL)
    member = r.trajectory_id(group_id, 0) if known else f"{group_id}/?{place_of(record.partition, record.offset)}"
    return Death(
        group_id=group_id,
        trajectory_ids=(member,),
        source=record.source,
        offset=record.offset,
        unnamed=not known,
    )


def _deaths(letter: r.DeadLetter, record: LogRecord) -> Iterator[Death]:
    by_group: dict[str, list[str]] = {}
    for trajectory in letter.trajectory_ids:
        by_group.setdefault(r.group_id_of(trajectory), []).append(trajectory)
    for group, ids in by_group.items():
        yield Death(group_id=group, trajectory_ids=tuple(ids), source=record.source, offset=record.offset)
