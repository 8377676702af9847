"""kill -9 against processes that copy through a real broker."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter

import pytest

from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicSpec
from laminar.streams.reading import partitions_of, read_topic
from tests.chaos import kafka_worker

TOTAL = 2000
KILLS = 6
WORKERS = 2


@pytest.mark.kafka
@pytest.mark.slow
def test_every_record_is_copied_exactly_once_whatever_is_killed(broker: Broker) -> None:
    rng, tag = random.Random(0), uuid.uuid4().hex[:8]
    source, target, group = f"in-{tag}", f"out-{tag}", f"copy-{tag}"
    log = KafkaLog(broker.bootstrap)
    log.create_topics([TopicSpec(name=source, partitions=4), TopicSpec(name=target, partitions=3)])
    feeder = log.producer(f"feed-{tag}")

    def feed(portion: int) -> None:
        """There is work left until the last kill, however quick the workers are."""
        with feeder.transaction() as tx:
            for number in range(portion, TOTAL, KILLS + 1):
                tx.send(OutRecord(topic=source, key=b"%d" % number, value=b"%d" % number))

    feed(0)

    def start(slot: int) -> subprocess.Popen[bytes]:
        options = (broker.bootstrap, source, target, group, f"copy-{tag}-{slot}")
        return subprocess.Popen([sys.executable, "-m", kafka_worker.__name__, *options])

    workers = [start(slot) for slot in range(WORKERS)]
    kills = 0
    try:
        deadline = Deadline.after(120, "everything is copied")
        reader = log.reader()
        before = -1
        while kills < KILLS or sum(log.lag(group, source).values()):
            deadline.check(f"lag {log.lag(group, source)}")
            written = sum(reader.bounds(p).end for p in partitions_of(log, target))
            if kills < KILLS and written > before:
                before = written
                time.sleep(rng.uniform(0.0, 0.1))
                slot = rng.randrange(WORKERS)
                workers[slot].kill()
                assert workers[slot].wait() == -signal.SIGKILL
                workers[slot] = start(slot)
                kills += 1
                feed(kills)
            time.sleep(0.02)
        reader.close()
        assert [w.poll() for w in workers] == [None] * WORKERS
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    copied = Counter(r.value for r in read_topic(log, target, Deadline.after(30, "read the copies")))
    assert copied == Counter({b"%d" % number: 1 for number in range(TOTAL)})
    log.close()
