"""The development broker as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.schemas.errors import ConfigError, DeadlineExceeded, Unavailable, UnknownTopic
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, Reader, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import WAIT_S, commit, poll_some, produce, read_values, until_true

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_CHILD = """
import sys, time
from pathlib import Path
from laminar.streams.broker import Broker
print(Broker(Path(sys.argv[1]), port=0).start().pid, flush=True)
time.sleep(600)
"""


def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            Broker(tmp_path, port=port).start()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_its_broker_goes_on(broker: Broker, log: KafkaLog) -> None:
    settings = (broker.directory / "server.properties").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=f"another broker runs in {broker.directory}"):
        Broker(broker.directory, port=0).start()
    assert (broker.directory / "server.properties").read_text(encoding="utf-8") == settings
    assert broker.running
    log.topics()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    broker = Broker(tmp_path, port=0, settings={"node.id": "-5"})
    with pytest.raises(Unavailable, match=r"node\.id"):
        broker.start()
    assert not broker.running


def test_killed_inside_a_commit_and_restarted_the_broker_keeps_all_but_what_was_not_committed(
    broker: Broker, log: KafkaLog, make_log: Callable[..., KafkaLog], unique: Callable[[str], str]
) -> None:
    source, target, group, name = unique("in"), unique("out"), unique("g"), unique("p")
    log.create_topics([TopicSpec(name=source, partitions=1), TopicSpec(name=target, partitions=1)])
    where, producer = TopicPartition(source, 0), log.producer(name)
    produce(producer, source, [b"a", b"b"])
    consumer = log.consumer(group, [source])
    poll_some(consumer, 2)
    commit(producer, consumer, {where: 1})

    def interrupted() -> None:
        with producer.transaction(timeout_s=0.5) as tx:
            tx.send(OutRecord(topic=target, key=b"k", value=b"lost"))
            tx.commit_offsets(consumer.membership(), {where: 2})
            broker.kill()

    try:
        with pytest.raises((Unavailable, DeadlineExceeded), match=f"transaction of {name} commits"):
            interrupted()
    finally:
        broker.start()
    with producer.transaction(timeout_s=WAIT_S) as tx:
        tx.send(OutRecord(topic=target, key=b"k", value=b"kept"))
    after = make_log()
    assert read_values(after, source) == [b"a", b"b"]
    until_true(lambda: read_values(after, target) == [b"kept"], "the markers are written")
    assert after.committed(group, source) == {where: 1}


def test_a_folder_of_a_newer_kafka_is_refused_by_name(tmp_path: Path) -> None:
    broker = Broker(tmp_path, port=0)
    words = (
        "Caused by: org.apache.kafka.common.errors.UnsupportedVersionException: Can't read version 4 of BrokerEndpoint"
    )
    broker.log_file.write_text(f"{words}\n\tat somewhere\n")
    said = broker._exited()
    assert isinstance(said, ConfigError)
    assert f"{tmp_path} was written by a Kafka newer than" in str(said)


def test_a_topic_is_not_called_unknown_while_its_broker_is_away(
    broker: Broker, make_log: Callable[..., KafkaLog], unique: Callable[[str], str]
) -> None:
    log = make_log(request_timeout_s=0.5)
    name = unique("topic")
    log.create_topics([TopicSpec(name=name, partitions=4)])
    reader = log.reader()
    every = [TopicPartition(name, partition) for partition in range(4)]
    assert all(reader.bounds(partition).end == 0 for partition in every)
    broker.kill()
    try:
        for partition in (*every, *every):
            with pytest.raises((Unavailable, DeadlineExceeded)):
                reader.bounds(partition)
    finally:
        broker.start()
    until_true(lambda: _answers(reader, every), "all partitions answer again")
    with pytest.raises(UnknownTopic, match="4"):
        reader.bounds(TopicPartition(name, 4))
    reader.close()


def test_a_process_without_its_broker_does_not_spend_itself_on_connecting(
    broker: Broker, log: KafkaLog, unique: Callable[[str], str]
) -> None:
    name = unique("topic")
    log.create_topics([TopicSpec(name=name, partitions=1)])
    reader = log.reader()
    reader.assign({TopicPartition(name, 0): 0})
    reader.poll(1, 3.0)
    broker.kill()
    try:
        spent, until = time.process_time(), time.monotonic() + 6.0  # the topics are asked for every 2 s
        while time.monotonic() < until:
            reader.poll(1, 0.2)
        spent = time.process_time() - spent
    finally:
        broker.start()
    reader.close()
    assert spent < 1.0  # by all threads; connecting without a pause takes most of a CPU


def _answers(reader: Reader, partitions: list[TopicPartition]) -> bool:
    try:
        return all(reader.bounds(partition).end == 0 for partition in partitions)
    except (Unavailable, DeadlineExceeded):
        return False


def test_the_broker_dies_with_the_process_that_started_it_even_by_kill_9(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    status = Path(f"/proc/{pid}/cmdline")
    assert "kafka.Kafka" in status.read_text(encoding="utf-8")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = Deadline.after(10, "the broker is gone")
    while status.exists() and status.read_text(encoding="utf-8"):
        deadline.check()
        time.sleep(0.02)
