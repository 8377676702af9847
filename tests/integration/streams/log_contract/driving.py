"""How the contract suite drives a log: produce, poll until, settle. Every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from laminar.streams.deadline import Deadline
from laminar.streams.log import Consumer, Log, LogRecord, OutRecord, Producer, Reader, TopicPartition

WAIT_S = 30.0


def produce(producer: Producer, topic: str, values: Iterable[bytes], *, partition: int | None = 0) -> None:
    """One transaction with these values."""
    with producer.transaction() as tx:
        for value in values:
            tx.send(OutRecord(topic=topic, key=b"k", value=value, partition=partition))


def read_values(log: Log, topic: str, partition: int = 0) -> list[bytes | None]:
    """All that is readable now, from the beginning."""
    return [r.value for r in read_records(log, topic, partition)]


def read_records(log: Log, topic: str, partition: int = 0) -> list[LogRecord]:
    """All that is readable now, from the beginning."""
    where = TopicPartition(topic, partition)
    reader = log.reader()
    bounds = reader.bounds(where)
    reader.assign({where: bounds.start})
    found: list[LogRecord] = []
    deadline = Deadline.after(WAIT_S, f"read {where}")
    while reader.position()[where] < bounds.end:
        deadline.check(f"at {reader.position()} of {bounds}")
        found += reader.poll(100, 0.1)
    reader.close()
    return found


def poll_some(source: Consumer | Reader, count: int) -> list[LogRecord]:
    """Poll until at least ``count`` records came."""
    found: list[LogRecord] = []
    deadline = Deadline.after(WAIT_S, f"{count} records")
    while len(found) < count:
        deadline.check(f"got {len(found)}")
        found += source.poll(100, 0.1)
    return found


def settle(consumers: Sequence[Consumer], until: Callable[[], bool], what: str) -> list[LogRecord]:
    """Poll all of them in turn until the condition holds; returns every record on the way."""
    found: list[LogRecord] = []
    deadline = Deadline.after(WAIT_S, what)
    while not until():
        deadline.check(str([sorted(map(str, c.assignment())) for c in consumers]))
        for consumer in consumers:
            found += consumer.poll(100, 0.02)
    return found


def until_true(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens by itself."""
    deadline = Deadline.after(WAIT_S, what)
    while not condition():
        deadline.check()
        time.sleep(0.02)


def commit(producer: Producer, consumer: Consumer, offsets: Mapping[TopicPartition, int]) -> None:
    """One transaction with nothing but offsets."""
    with producer.transaction() as tx:
        tx.commit_offsets(consumer.membership(), offsets)
