"""A member whose group's offsets somebody holds open for good."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import Unavailable
from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import TopicPartition
from tests.integration.streams.log_contract.driving import WAIT_S, poll_some, produce, until_true

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_offsets_that_stay_open_for_too_long_end_the_member_with_their_name(
    broker: Broker, make_log: Callable[..., KafkaLog], topic: str, unique: Callable[[str], str]
) -> None:
    group = unique("g")
    produce(make_log().producer(unique("p")), topic, [b"a", b"b"])
    holder = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": unique("holder")})
    holder.init_transactions(WAIT_S)
    holder.begin_transaction()
    member = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    offsets = [Partition(topic, partition, 0) for partition in (0, 1)]
    holder.send_offsets_to_transaction(offsets, member.consumer_group_metadata(), WAIT_S)
    member.close()
    log = make_log(request_timeout_s=0.5, transaction_timeout_s=1.0)
    waiting = log.consumer(group, [topic])

    def poll_for_long() -> None:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            assert waiting.poll(10, 0.1) == []

    with pytest.raises(Unavailable, match=rf"{group}: no committed offset of {topic}\[0\], {topic}\[1\]"):
        poll_for_long()
    waiting.close()
    holder.abort_transaction(WAIT_S)
    assert len(poll_some(make_log().consumer(group, [topic]), 2)) == 2


def test_records_that_come_as_the_patience_ends_are_handed_out(
    make_log: Callable[..., KafkaLog], topic: str, unique: Callable[[str], str]
) -> None:
    log = make_log(request_timeout_s=5.0, transaction_timeout_s=6.0)
    consumer, producer, one = log.consumer(unique("g"), [topic]), log.producer(unique("p")), TopicPartition(topic, 1)
    produce(producer, topic, [b"first"], partition=1)
    until_true(lambda: not consumer.poll(10, 0.1) and consumer.position().get(one) == 2, "its end has been seen")
    values = [b"%d" % i for i in range(20)]
    produce(producer, topic, values, partition=0)
    consumer._intake.positions[one] = -1000  # as if its offset were held open
    consumer._waiting_since = 0.0
    got: list[bytes | None] = []
    failures = 0
    until = time.monotonic() + WAIT_S
    while len(got) < len(values) and time.monotonic() < until:
        try:
            got += [record.value for record in consumer.poll(10, 0.1)]
        except Unavailable:
            failures += 1
    assert failures
    assert got == values
