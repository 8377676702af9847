"""Where a member begins when the broker's own answers contradict each other, as they do while it comes up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.streams.kafka import KafkaLog
from laminar.streams.kafka.consumer import _STORED, KafkaConsumer
from laminar.streams.log import TopicPartition
from tests.integration.streams.log_contract.driving import commit, poll_some, produce

pytestmark = pytest.mark.kafka

Unique = Callable[[str], str]


def member(log: KafkaLog, topic: str, unique: Unique) -> tuple[KafkaConsumer, TopicPartition]:
    """A member that has read three records and committed the first."""
    where, producer = TopicPartition(topic, 0), log.producer(unique("p"))
    produce(producer, topic, [b"a", b"b", b"c"])
    consumer = log.consumer(unique("g"), [topic])
    poll_some(consumer, 3)
    commit(producer, consumer, {where: 1})
    return consumer, where


def test_a_committed_offset_that_was_said_not_to_be_there_is_where_it_begins(
    log: KafkaLog, topic: str, unique: Unique
) -> None:
    consumer, where = member(log, topic, unique)
    consumer._intake.positions[where] = _STORED  # librdkafka waits for it, and then says that there is none
    assert consumer._begin_without_offset(where) is True
    assert [record.value for record in poll_some(consumer, 2)] == [b"b", b"c"]
