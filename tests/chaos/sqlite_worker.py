"""A process that the kill test starts: ``feed`` writes numbered records, ``copy`` consumes, transforms and produces.

Both only ever use one transaction per step, so that being killed anywhere is harmless if the log keeps its promise.
"""

from __future__ import annotations

import sys
import time

from laminar.schemas.errors import Aborted, Evicted
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, OutRecord
from laminar.streams.reading import read_topic
from laminar.streams.sqlite import SqliteLog

BATCH = 10
LARGE = 100_000


def payload(number: int) -> bytes:
    """Every seventh is large enough for a segment file."""
    return f"{number}/".encode() + bytes([number % 251]) * (LARGE if number % 7 == 0 else 20)


def feed(log: Log, total: int) -> None:
    """Write the numbers up to ``total`` that are not there yet: in one transaction to ``in`` and to ``index``."""
    producer = log.producer("feed")
    done = [int(r.value or b"") for r in read_topic(log, "index", Deadline.after(20, "read index"))]
    for start in range(max(done, default=-BATCH) + BATCH, total, BATCH):
        with producer.transaction() as tx:
            for number in range(start, start + BATCH):
                tx.send(OutRecord(topic="in", key=str(number).encode(), value=payload(number)))
            tx.send(OutRecord(topic="index", key=b"k", value=str(start).encode()))
        time.sleep(0.01)  # so that it runs as long as there are processes to kill


def copy(log: Log, instance: str, producer_id: str) -> None:
    """Copy ``in`` to ``out`` for ever."""
    producer = log.producer(producer_id)
    consumer = log.consumer("copy", ["in"], instance=instance)
    while True:
        records = consumer.poll(4, 1.0)
        if not records:
            continue
        try:
            with producer.transaction() as tx:
                for record in records:
                    tx.send(OutRecord(topic="out", key=record.key, value=record.value))
                tx.commit_offsets(consumer.membership(), consumer.position())
        except (Evicted, Aborted):
            consumer.close()
            consumer = log.consumer("copy", ["in"], instance=instance)


def main() -> None:
    """``feed DIR TOTAL`` or ``copy DIR INSTANCE PRODUCER``."""
    role, directory, *rest = sys.argv[1:]
    log = SqliteLog(directory, session_timeout_s=1.0)
    if role == "feed":
        feed(log, int(rest[0]))
    else:
        copy(log, rest[0], rest[1])


if __name__ == "__main__":
    main()
