"""A transaction that a killed broker was in ends everywhere once it is back (not with Kafka 4.3.1: KAFKA-20734)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import WAIT_S, produce, read_values

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

TIMEOUT_S = 2.0

_OWNER = """
import sys, time
from confluent_kafka import Consumer, Producer, TopicPartition
bootstrap, source, target, group, name, timeout_ms = sys.argv[1:]
at = {"bootstrap.servers": bootstrap}
producer = Producer({**at, "transactional.id": name, "transaction.timeout.ms": int(timeout_ms)})
producer.init_transactions(10)
producer.begin_transaction()
producer.produce(target, b"open", partition=0)
producer.flush(10)
member = Consumer({**at, "group.id": group})
producer.send_offsets_to_transaction([TopicPartition(source, 0, 2)], member.consumer_group_metadata(), 10)
print("open", flush=True)
time.sleep(600)
"""


def test_what_timed_out_while_the_broker_was_down_is_over_when_it_is_back(
    tmp_path: Path, unique: Callable[[str], str]
) -> None:
    source, target, group, name = (unique(word) for word in ("in", "out", "g", "p"))
    with Broker(tmp_path, port=0, session_timeout_s=3.0) as broker:
        log = KafkaLog(broker.bootstrap)
        log.create_topics([TopicSpec(name=source, partitions=1), TopicSpec(name=target, partitions=1)])
        producer = log.producer(unique("feed"))
        produce(producer, source, [b"a", b"b"])
        command = [sys.executable, "-c", _OWNER, broker.bootstrap, source, target, group, name]
        with subprocess.Popen([*command, str(int(1000 * TIMEOUT_S))], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"open\n"
            broker.kill()
            owner.kill()
        time.sleep(TIMEOUT_S)
        broker.start()
        consumer = log.consumer(group, [source])
        got: list[bytes | None] = []
        until = time.monotonic() + WAIT_S
        while len(got) < 2 and time.monotonic() < until:
            got += [record.value for record in consumer.poll(10, 0.1)]
        assert got == [b"a", b"b"], "the group gets its offsets"
        produce(producer, target, [b"after"])
        assert read_values(log, target) == [b"after"], "nothing stands before what is written later"
        assert log.reader().bounds(TopicPartition(target, 0)).end >= 3
        with log.producer(name).transaction() as tx:
            tx.send(OutRecord(topic=target, key=b"k", value=b"next owner"))
        log.close()
