"""A process that takes the place of one that was killed, under the same instance name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from tests.integration.streams.log_contract.driving import commit, poll_some, produce

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_MEMBER = """
import sys
from laminar.streams.kafka import KafkaLog
bootstrap, topic = sys.argv[1:]
consumer = KafkaLog(bootstrap).consumer("killed-" + topic, [topic], instance="worker-0")
while True:
    if consumer.poll(10, 0.1):
        print("taken", flush=True)
"""


def test_the_next_process_of_a_killed_static_member_waits_for_the_end_of_its_session(
    broker: Broker, log: KafkaLog, topic: str, unique: Callable[[str], str]
) -> None:
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"a", b"b"])
    command = [sys.executable, "-c", _MEMBER, broker.bootstrap, topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as member:
        assert member.stdout is not None
        assert member.stdout.readline() == "taken\n"
        member.kill()
    successor = log.consumer(f"killed-{topic}", [topic], instance="worker-0")
    records = poll_some(successor, 2)
    assert sorted(record.value or b"" for record in records) == [b"a", b"b"]
    commit(producer, successor, {record.source: record.offset + 1 for record in records})
