"""What happens under running clients: topics made again or given more partitions, brokers killed and restarted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from laminar.schemas.errors import LaminarError, Retryable, TopicMismatch, UnknownTopic
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.partitioner import partition_of
from laminar.streams.reading import Tail, read_topic
from tests.integration.streams.log_contract.driving import WAIT_S, poll_some, produce

pytestmark = pytest.mark.kafka

Make = Callable[..., KafkaLog]
Unique = Callable[[str], str]
PROTOCOLS = pytest.mark.parametrize("protocol", ["consumer", "classic"])


def make_again(log: KafkaLog, topic: str, values: list[bytes]) -> None:
    """Delete a topic and make another of the same name, with these records."""
    log.delete_topic(topic)
    log.create_topics([TopicSpec(name=topic, partitions=1)])
    if values:
        produce(log.producer(f"{topic}-again"), topic, values)


def until_raised(call: Callable[[], object], kind: type[LaminarError]) -> str:
    """Call until it raises; what is not of this kind fails."""
    deadline = Deadline.after(WAIT_S, kind.__name__)
    while True:
        deadline.check()
        try:
            call()
        except Retryable:
            continue
        except kind as e:
            return str(e)


@PROTOCOLS
@pytest.mark.parametrize("records", [0, 1, 9])
def test_a_topic_that_is_made_again_under_a_consumer_is_fatal_and_never_begun_anew(
    make_log: Make, unique: Unique, protocol: str, records: int
) -> None:
    """With fewer records than were read, and with more: then the old position is a valid one, and read from at most
    until the consumer is told."""
    log, outside, topic = make_log(group_protocol=protocol), make_log(), unique("topic")
    outside.create_topics([TopicSpec(name=topic, partitions=1)])
    produce(outside.producer(topic), topic, [b"1", b"2", b"3"])
    consumer = log.consumer(unique("g"), [topic])
    assert [r.value for r in poll_some(consumer, 3)] == [b"1", b"2", b"3"]
    make_again(outside, topic, [b"new"] * records)
    seen: list[int] = []
    text = until_raised(lambda: seen.extend(r.offset for r in consumer.poll(100, 0.1)), TopicMismatch)
    assert f"{topic} on " in text
    assert "was deleted and made again while it was in use (topic id " in text
    assert min(seen, default=99) > 3, "where the old topic was read up to, and its marker"
    if records < 9:
        assert seen == []


@pytest.mark.parametrize("records", [0, 9])
def test_a_topic_that_is_made_again_under_a_reader_or_a_producer_is_fatal(
    make_log: Make, unique: Unique, records: int
) -> None:
    log, outside, topic = make_log(), make_log(), unique("topic")
    outside.create_topics([TopicSpec(name=topic, partitions=1)])
    producer, reader = log.producer(topic), log.reader()
    produce(producer, topic, [b"1", b"2", b"3"])
    reader.assign({TopicPartition(topic, 0): 0})
    poll_some(reader, 3)
    make_again(outside, topic, [b"new"] * records)
    assert "was deleted and made again" in until_raised(lambda: reader.poll(100, 0.1), TopicMismatch)
    assert "was deleted and made again" in until_raised(lambda: produce(producer, topic, [b"4"]), TopicMismatch)


def test_a_topic_that_is_deleted_under_a_consumer_is_fatal(make_log: Make, unique: Unique) -> None:
    log, outside, topic = make_log(), make_log(), unique("topic")
    outside.create_topics([TopicSpec(name=topic, partitions=1)])
    produce(outside.producer(topic), topic, [b"1"])
    consumer = log.consumer(unique("g"), [topic])
    poll_some(consumer, 1)
    outside.delete_topic(topic)
    assert topic in until_raised(lambda: consumer.poll(100, 0.1), UnknownTopic)


def add_partitions(broker: Broker, topic: str, count: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_partitions([NewPartitions(topic, count)]).values():
        future.result(WAIT_S)


@PROTOCOLS
def test_partitions_that_are_added_are_read_by_all_and_move_no_key(
    broker: Broker, make_log: Make, unique: Unique, protocol: str
) -> None:
    topic, keys = unique("topic"), [str(n).encode() for n in range(40)]
    client = {"topic.metadata.refresh.interval.ms": 1000}
    settings: Mapping[str, Any] = {"partitions": {topic: 2}, "client": client, "group_protocol": protocol}
    log = make_log(**settings)
    spec = TopicSpec(name=topic, partitions=2)
    log.create_topics([spec])
    producer, consumer, tail = log.producer(topic), log.consumer(unique("g"), [topic]), Tail(log, [topic])
    send(producer, topic, keys)
    assert {r.key: r.partition for r in poll_some(consumer, 40)} == {key: partition_of(key, 2) for key in keys}
    add_partitions(broker, topic, 5)

    after = make_log(**settings)
    after.create_topics([spec])  # a process that starts now does not mind
    for one in (producer, after.producer(unique("p"))):
        send(one, topic, keys)
        assert {r.key: r.partition for r in poll_some(consumer, 40)} == {key: partition_of(key, 2) for key in keys}
    foreign = make_log().producer(unique("foreign"))
    produce(foreign, topic, [b"added"], partition=4)
    found = poll_some(consumer, 1)
    assert [(r.value, r.partition) for r in found] == [(b"added", 4)]
    assert len(consumer.assignment()) == 5
    with pytest.raises(TopicMismatch, match=f"{topic}: has 5 partitions .*, 2 are configured"):
        make_log().create_topics([spec])
    assert len(list(read_topic(log, topic, Deadline.after(WAIT_S, "read")))) == 121
    deadline, tailed = Deadline.after(WAIT_S, "the tail has all that has a key of the run"), 0
    while tailed < 120:
        deadline.check(str(tailed))
        tailed += len(tail.poll(1000, 0.2))
    assert log.lag("nobody", topic)[TopicPartition(topic, 4)] == 1


def send(producer: Any, topic: str, keys: list[bytes]) -> None:
    with producer.transaction() as transaction:
        for key in keys:
            transaction.send(OutRecord(topic=topic, key=key, value=key))


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "how"), [("consumer", "kill"), ("classic", "stop")])
def test_a_broker_that_is_restarted_costs_a_consumer_and_a_producer_nothing(
    broker: Broker, make_log: Make, unique: Unique, protocol: str, how: str
) -> None:
    """The leader epoch of every partition grows with it."""
    log, source, target, group = make_log(group_protocol=protocol), unique("in"), unique("out"), unique("g")
    log.create_topics([TopicSpec(name=source, partitions=2), TopicSpec(name=target, partitions=2)])
    producer, consumer, writer = log.producer(unique("p")), log.consumer(group, [source]), log.producer(unique("w"))
    wanted = [str(n).encode() for n in range(20)]
    for number, value in enumerate(wanted):
        if number == 10:
            getattr(broker, how)()
            broker.start()
        with writer.transaction(timeout_s=2 * WAIT_S) as transaction:
            transaction.send(OutRecord(topic=source, key=value, value=value))
        if number % 5 == 4 and number != 9:  # the broker goes away with 5 records that are still to be read
            copy(log, group, source, consumer, producer, target)
    copied = [r.value for r in read_topic(log, target, Deadline.after(WAIT_S, "read"))]
    assert sorted(copied, key=lambda v: int(v or b"")) == wanted


def copy(log: KafkaLog, group: str, source: str, consumer: Any, producer: Any, target: str) -> None:
    """Move records, exactly once, until the group has committed all there is; as the loop does it."""
    deadline = Deadline.after(2 * WAIT_S, "all records are copied")
    while any(log.lag(group, source).values()):
        deadline.check(f"{consumer.position()} of {consumer.assignment()}")
        records = consumer.poll(100, 0.2)
        try:
            if records:
                with producer.transaction(timeout_s=WAIT_S) as transaction:
                    for record in records:
                        transaction.send(OutRecord(topic=target, key=record.key, value=record.value))
                    transaction.commit_offsets(consumer.membership(), consumer.position())
        except Retryable:
            committed = consumer.committed()
            for partition in consumer.assignment():
                consumer.seek(partition, committed.get(partition, 0))
