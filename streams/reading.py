"""Reading whole topics over the log port, outside any group.

>>> for record in read_topic(log, "training.steps", Deadline.after(30, "read training.steps")):    # doctest: +SKIP
...     ...                                      # everything that was on the topic when the reading began
>>> tail = Tail(log, ["weights.versions"])                                                         # doctest: +SKIP
>>> tail.poll()                                  # what is new since the last poll, without waiting
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from laminar.schemas.errors import DecodeError, UnknownTopic
from laminar.schemas.records import Record
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord, TopicPartition
from laminar.streams.topics import TOPICS

__all__ = ["Decoder", "Tail", "belongs", "decoded", "partitions_of", "read_topic", "skipped"]

_BATCH = 1000
_WAIT_S = 0.2

logger = logging.getLogger(__name__)

skipped: Counter[str] = Counter()
"""Topic -> records that ``decoded`` has passed over since this process began."""


class Decoder(Protocol):
    """Turns framed bytes into a record (``laminar.schemas.codec.Codec``)."""

    def decode(self, data: bytes) -> Record:
        """Raises DecodeError."""


def partitions_of(log: Log, topic: str) -> list[TopicPartition]:
    """All partitions of a topic, in order. Raises UnknownTopic."""
    known = log.topics()
    if topic not in known:
        raise UnknownTopic(f"{topic}: no such topic (valid: {', '.join(sorted(known))})")
    return [TopicPartition(topic, p) for p in range(known[topic].partitions)]


def decoded(records: Iterable[LogRecord], codec: Decoder) -> Iterator[tuple[LogRecord, Record]]:
    """Each record with what it holds, for readers that can do without what they cannot read.

    Tombstones are passed over. What does not decode, or does not belong on its topic, is counted in ``skipped`` and
    passed over; the 1st, 10th, 100th, ... of a topic is logged.
    """
    for record in records:
        if record.value is None:
            continue
        try:
            event = codec.decode(record.value)
            belongs(event, record.topic)
        except DecodeError as error:
            skipped[record.topic] += 1
            if str(skipped[record.topic]).rstrip("0") == "1":
                logger.warning("%s: skipped: %s (%d of this topic so far)", record.where, error, skipped[record.topic])
        else:
            yield record, event


def belongs(record: Record, topic: str) -> None:
    """Raise DecodeError unless the catalogue lets a record of this type stand on the topic (others may hold any)."""
    known = TOPICS.get(topic)
    if known is not None and not isinstance(record, known.records):
        valid = ", ".join(kind.__name__ for kind in known.records)
        raise DecodeError(f"a {type(record).__name__} does not belong on {topic} (valid: {valid})")


def read_topic(
    log: Log,
    topic: str,
    deadline: Deadline,
    *,
    positions: Mapping[TopicPartition, int] | None = None,
) -> Iterator[LogRecord]:
    """Every record from ``positions`` (default: the beginning) to the end as it is now, in order per partition.

    Raises UnknownTopic, OffsetOutOfRange, DeadlineExceeded.
    """
    reader = log.reader()
    try:
        bounds = {p: reader.bounds(p) for p in partitions_of(log, topic)}
        start = {p: (positions or {}).get(p, b.start) for p, b in bounds.items()}
        left = {p: bounds[p].end for p in bounds if start[p] < bounds[p].end}
        reader.assign({p: start[p] for p in left})
        while left:
            for record in reader.poll(_BATCH, min(_WAIT_S, deadline.remaining())):
                if record.offset < bounds[record.source].end:
                    yield record
            at = reader.position()
            left = {p: end for p, end in left.items() if at.get(p, 0) < end}
            if left:
                deadline.check(f"{topic}: {', '.join(f'{p}@{at.get(p, 0)} of {end}' for p, end in left.items())}")
    finally:
        reader.close()


class Tail:
    """Follows topics from a point on. Several topics are read independently: order holds per partition only."""

    def __init__(
        self,
        log: Log,
        topics: Sequence[str],
        *,
        start: Literal["beginning", "end"] | Mapping[TopicPartition, int] = "beginning",
    ) -> None:
        """``start``: every partition's beginning, its end as of now, or given offsets (others: the beginning).

        Raises UnknownTopic.
        """
        self._reader = log.reader()
        self._positions: dict[TopicPartition, int] = {}
        for topic in topics:
            for partition in partitions_of(log, topic):
                first, end = self._reader.bounds(partition)
                if isinstance(start, str):
                    self._positions[partition] = end if start == "end" else first
                else:
                    self._positions[partition] = start.get(partition, first)
        self._reader.assign(self._positions)

    def poll(self, max_records: int = _BATCH, timeout_s: float = 0.0) -> list[LogRecord]:
        """New records; [] when nothing came in time. Raises OffsetOutOfRange."""
        return self._reader.poll(max_records, timeout_s)

    def position(self) -> dict[TopicPartition, int]:
        """Next offset per partition."""
        return self._reader.position()

    def behind(self) -> dict[TopicPartition, int]:
        """How far each partition's end is away, as of now; every value 0: caught up."""
        at = self._reader.position()
        return {p: max(0, self._reader.bounds(p).end - at[p]) for p in at}

    def catch_up(self, deadline: Deadline) -> Iterator[LogRecord]:
        """Every record up to the end as it is now. Raises DeadlineExceeded."""
        ends = {p: self._reader.bounds(p).end for p in self._reader.position()}
        while any(self._reader.position()[p] < end for p, end in ends.items()):
            deadline.check(", ".join(f"{p}@{at}" for p, at in self._reader.position().items()))
            yield from self._reader.poll(_BATCH, min(_WAIT_S, deadline.remaining()))

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
