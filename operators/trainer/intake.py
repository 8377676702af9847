"""What the trainer reads: scored trajectories and dead letters from its own offsets, and the run's events.

A record on ``trajectories.scored`` that cannot be decoded becomes a dead letter and stops nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from laminar.operators.operator import Context
from laminar.operators.trainer.batch import Arrival, Death, Event
from laminar.schemas import records as r
from laminar.schemas.errors import DecodeError, OffsetOutOfRange
from laminar.streams.log import LogRecord, TopicPartition
from laminar.streams.reading import partitions_of

__all__ = ["DEAD", "SCORED", "STEPS", "Intake", "Taken"]

SCORED = "trajectories.scored"
DEAD = "dead.letters"
STEPS = "training.steps"

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
        self._reader = context.log.reader()
        wanted = {p: positions.get(p, 0) for topic in (SCORED, DEAD) for p in partitions_of(context.log, topic)}
        for partition, offset in wanted.items():
            bounds = self._reader.bounds(partition)
            if offset < bounds.start:
                raise OffsetOutOfRange(
                    f"{partition}: the trainer needs offset {offset}, but the log begins at {bounds.start};"
                    f" what lies between was never trained on (retention is too short)"
                )
        self._reader.assign({**wanted, TopicPartition(STEPS, 0): steps_from})

    def poll(self, max_records: int, now: float) -> Taken:
        """What is there now, without waiting. Raises OffsetOutOfRange, Retryable."""
        # By age over all partitions, so that no partition's groups are preferred.
        polled = sorted(self._reader.poll(max_records, 0.0), key=lambda record: record.timestamp_ms)
        events: list[Event] = []
        others: list[r.Record] = []
        letters: list[r.DeadLetter] = []
        for record in polled:
            try:
                decoded = self._context.codec.decode(record.value or b"")
                if record.topic == SCORED and not isinstance(decoded, r.ScoredTrajectory):
                    raise DecodeError(f"a {type(decoded).__name__} does not belong on {SCORED}")
            except DecodeError as error:
                logger.warning("%s: %s", record.where, error)
                if record.topic == SCORED:
                    letters.append(self._letter(record, error, now))
                continue
            match decoded:
                case r.ScoredTrajectory():
                    events.append(
                        Arrival(scored=decoded, source=record.source, offset=record.offset, value=record.value or b"")
                    )
                case r.DeadLetter():
                    events.extend(_deaths(decoded, record))
                case _:
                    others.append(decoded)
        return Taken(len(polled), tuple(events), tuple(others), tuple(letters))

    def position(self) -> dict[TopicPartition, int]:
        """Next offset of each partition that a checkpoint must remember."""
        return {p: offset for p, offset in self._reader.position().items() if p.topic != STEPS}

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _letter(self, record: LogRecord, error: DecodeError, now: float) -> r.DeadLetter:
        return r.DeadLetter(
            operator=self._context.instance,
            kind=type(error).__name__,
            error=str(error),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            attempt=1,
            key=record.key,
            value=record.value,
            headers=tuple(r.Header(key=key, value=value) for key, value in record.headers),
            at_ms=int(now * 1000),
        )


def _deaths(letter: r.DeadLetter, record: LogRecord) -> list[Death]:
    by_group: dict[str, list[str]] = {}
    for trajectory in letter.trajectory_ids:
        by_group.setdefault(r.group_id_of(trajectory), []).append(trajectory)
    return [
        Death(group_id=group, trajectory_ids=tuple(ids), source=record.source, offset=record.offset)
        for group, ids in by_group.items()
    ]
