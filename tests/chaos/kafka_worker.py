"""A process that the Kafka kill test starts: copies ``in`` to ``out``, exactly once if the log keeps its promise."""

from __future__ import annotations

import sys

from laminar.schemas.errors import Aborted, Evicted
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord


def main() -> None:
    """``BOOTSTRAP SOURCE TARGET GROUP PRODUCER``."""
    bootstrap, source, target, group, producer_id = sys.argv[1:]
    log = KafkaLog(bootstrap)
    producer = log.producer(producer_id)
    consumer = log.consumer(group, [source])
    while True:
        records = consumer.poll(10, 1.0)
        if not records:
            continue
        done = {record.source: record.offset + 1 for record in records}
        try:
            with producer.transaction() as tx:
                for record in records:
                    tx.send(OutRecord(topic=target, key=record.key, value=record.value))
                tx.commit_offsets(consumer.membership(), done)
        except (Aborted, Evicted):
            owned, committed = consumer.assignment(), consumer.committed()
            for record in reversed(records):
                if record.source in owned:
                    consumer.seek(record.source, max(record.offset, committed.get(record.source, 0)))


if __name__ == "__main__":
    main()
