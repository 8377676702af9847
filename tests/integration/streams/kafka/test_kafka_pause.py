"""Pausing: nothing of a paused partition comes, nothing of it is lost, and what is held meanwhile is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import LogRecord, OutRecord, TopicPartition
from tests.integration.streams.log_contract.driving import WAIT_S, poll_some, until_true

pytestmark = pytest.mark.kafka

Unique = Callable[[str], str]
COUNT, BYTES = 120, 100_000
"""Of each partition: 12 MB, three times what a consumer holds of paused ones."""


def fill(log: KafkaLog, topic: str, unique: Unique, size: int = BYTES) -> None:
    with log.producer(unique("p")).transaction() as tx:
        for i in range(COUNT):
            for partition in range(2):
                value = bytes([i]) * size
                tx.send(OutRecord(topic=topic, key=b"%d" % i, value=value, partition=partition))


@pytest.mark.parametrize(("size", "stopped"), [(1_000, False), (BYTES, True)])
def test_a_paused_partition_keeps_its_place_and_the_other_goes_on(
    size: int, stopped: bool, log: KafkaLog, topic: str, unique: Unique
) -> None:
    fill(log, topic, unique, size)
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    consumer = log.consumer(unique("g"), [topic], on_assign=lambda _: consumer.pause(frozenset({zero})))
    got: dict[TopicPartition, list[LogRecord]] = {zero: [], one: []}
    deadline = Deadline.after(WAIT_S, "all records")
    while len(got[one]) < COUNT:
        for record in consumer.poll(10, 0.05):
            got[record.source].append(record)
        deadline.check()
    assert got[zero] == []
    assert consumer.position()[zero] == 0
    if stopped:
        until_true(lambda: consumer.poll(10, 0.05) == [] and bool(consumer._intake._stopped), "too much is held")
    assert consumer._intake._held_bytes <= 4 * 1024 * 1024 + BYTES
    assert bool(consumer._intake._stopped) is stopped  # what is too much to hold stays at the broker
    consumer.resume(frozenset({zero}))
    while sum(map(len, got.values())) < 2 * COUNT:
        for record in consumer.poll(10, 0.05):
            got[record.source].append(record)
        deadline.check()
    for records in got.values():
        assert [record.value[0] for record in records if record.value] == list(range(COUNT))
    until_true(lambda: not consumer.poll(1, 0.05) and consumer.position()[zero] > COUNT, "the control marker is passed")


def test_records_without_values_are_held_within_bounds_too(
    log: KafkaLog, topic: str, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.streams.kafka.intake._HOLD_BYTES", 2_000)
    with log.producer(unique("p")).transaction() as tx:
        for _ in range(COUNT):
            tx.send(OutRecord(topic=topic, key=b"k", value=None, partition=0))
    consumer = log.consumer(unique("g"), [topic], on_assign=lambda given: consumer.pause(given))
    until_true(lambda: consumer.poll(10, 0.05) == [] and bool(consumer._intake._stopped), "too much is held")
    assert sum(map(len, consumer._intake._held.values())) < COUNT
    consumer.resume(consumer.assignment())
    assert len(poll_some(consumer, COUNT)) == COUNT
    assert consumer._intake._held_bytes == 0


def test_what_is_held_of_a_paused_partition_is_dropped_by_a_seek(log: KafkaLog, topic: str, unique: Unique) -> None:
    fill(log, topic, unique)
    both = frozenset({TopicPartition(topic, 0), TopicPartition(topic, 1)})
    consumer = log.consumer(unique("g"), [topic], on_assign=lambda _: consumer.pause(both))
    until_true(lambda: consumer.poll(10, 0.05) == [] and consumer._intake._held_bytes > 0, "something is held")
    consumer.seek(TopicPartition(topic, 0), 7)
    consumer.seek(TopicPartition(topic, 1), COUNT - 1)
    consumer.resume(both)
    got: list[tuple[int, int]] = []
    deadline = Deadline.after(WAIT_S, "all records after the seek")
    while len(got) < COUNT - 7 + 1:
        got += [(record.partition, record.offset) for record in consumer.poll(50, 0.05)]
        deadline.check()
    assert sorted(got) == [(0, i) for i in range(7, COUNT)] + [(1, COUNT - 1)]


def test_a_partition_that_leaves_while_it_is_paused_and_comes_back_is_read(
    log: KafkaLog, make_log: Callable[..., KafkaLog], topic: str, unique: Unique
) -> None:
    fill(log, topic, unique)
    both = frozenset({TopicPartition(topic, 0), TopicPartition(topic, 1)})
    group = unique("g")
    pausing = [True]
    stays = log.consumer(group, [topic], on_assign=lambda given: stays.pause(given) if pausing else None)
    until_true(lambda: not stays.poll(10, 0.05) and stays._intake._stopped == both, "librdkafka has paused both")
    pausing.clear()
    passes = make_log().consumer(group, [topic])
    until_true(
        lambda: not stays.poll(10, 0.05) and passes.poll(10, 0.05) is not None and len(passes.assignment()) == 1,
        "one has moved",
    )
    (moved,) = passes.assignment()
    passes.close()
    got = 0
    deadline = Deadline.after(WAIT_S, "it is back, and read from its beginning")
    while got < COUNT:
        got += sum(record.source == moved for record in stays.poll(10, 0.05))
        deadline.check()
