"""Topics: creation, mismatch, deletion, retention and compaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from laminar.schemas.errors import TopicMismatch, UnknownTopic
from laminar.streams.log import Log, OutRecord, TopicInfo, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import (
    commit,
    poll_some,
    produce,
    read_records,
    read_values,
    until_true,
)

Unique = Callable[[str], str]
Open = Callable[[], Log]


def test_topics_are_created_once_and_listed_by_every_handle(open_log: Open, log: Log, unique: Unique) -> None:
    spec = TopicSpec(name=unique("t"), partitions=3, cleanup="compact")
    log.create_topics([spec])
    other = open_log()
    other.create_topics([spec])
    until_true(lambda: spec.name in other.topics(), "the topic is listed")
    assert other.topics()[spec.name] == TopicInfo(name=spec.name, partitions=3, cleanup="compact")


def test_another_number_of_partitions_is_a_mismatch_with_both_numbers(log: Log, topic: str) -> None:
    with pytest.raises(TopicMismatch, match=rf"{topic}.*2.*5"):
        log.create_topics([TopicSpec(name=topic, partitions=5)])
    assert log.topics()[topic].partitions == 2


def test_a_deleted_topic_is_gone_with_its_records_and_offsets(
    open_log: Open, log: Log, topic: str, unique: Unique
) -> None:
    group, producer, other = unique("g"), log.producer(unique("p")), open_log()
    produce(producer, topic, [b"a"])
    consumer = log.consumer(group, [topic])
    (record,) = poll_some(consumer, 1)
    commit(producer, consumer, {record.source: record.offset + 1})
    consumer.close()
    assert topic in other.topics()
    log.delete_topic(topic)
    until_true(lambda: topic not in other.topics(), "the topic is gone")
    with pytest.raises(UnknownTopic, match=topic):
        log.delete_topic(topic)
    with pytest.raises(UnknownTopic, match=topic):
        other.reader().bounds(TopicPartition(topic, 0))


def test_retention_by_time_removes_the_old_and_keeps_the_young(log: Log, unique: Unique, handles: Any) -> None:
    name, now = unique("t"), time.time()
    log.create_topics([TopicSpec(name=name, partitions=1, retention_ms=3_600_000)])
    producer, where = log.producer(unique("p")), TopicPartition(name, 0)
    with producer.transaction() as tx:
        for i in range(10):
            tx.send(OutRecord(topic=name, key=b"k", value=b"old", timestamp_ms=int((now - 7200) * 1000) + i))
    produce(producer, name, [b"young"] * 3)
    reader = log.reader()
    handles.maintain(log, now)
    until_true(lambda: reader.bounds(where).start > 0, "retention")
    assert read_values(log, name) == [b"young"] * 3
    assert 10 <= reader.bounds(where).start <= read_records(log, name)[0].offset


def test_retention_by_size_keeps_the_newest(log: Log, unique: Unique, handles: Any) -> None:
    name = unique("t")
    log.create_topics([TopicSpec(name=name, partitions=1, retention_bytes=300_000, max_record_bytes=200_000)])
    producer, where = log.producer(unique("p")), TopicPartition(name, 0)
    written = [b"%02d" % i * 50_000 for i in range(40)]
    for value in written:
        produce(producer, name, [value])
    handles.maintain(log, time.time())
    reader = log.reader()
    until_true(lambda: reader.bounds(where).start > 0, "retention")
    values = read_values(log, name)
    assert values == written[-len(values) :]
    assert 3 <= len(values) < 40


def test_compaction_keeps_the_newest_of_each_key_and_removes_deleted_keys(
    log: Log, unique: Unique, handles: Any
) -> None:
    name, hours = unique("t"), 48
    log.create_topics([TopicSpec(name=name, partitions=1, cleanup="compact")])
    producer, then = log.producer(unique("p")), int((time.time() - hours * 3600) * 1000)
    with producer.transaction() as tx:
        for i in range(20):
            tx.send(OutRecord(topic=name, key=b"%d" % (i % 4), value=b"%d" % i, timestamp_ms=then + i))
        tx.send(OutRecord(topic=name, key=b"0", value=None, timestamp_ms=then + 20))
    produce(producer, name, [b"last"])

    def compacted() -> bool:
        handles.maintain(log, time.time())
        return len(read_records(log, name)) < 10

    until_true(compacted, "compaction")
    records = read_records(log, name)
    assert {r.key: r.value for r in records if r.value is not None} == {
        b"1": b"17",
        b"2": b"18",
        b"3": b"19",
        b"k": b"last",
    }
    offsets = [r.offset for r in records]
    assert offsets == sorted(offsets)


def test_records_younger_than_the_compaction_lag_are_kept(log: Log, unique: Unique, handles: Any) -> None:
    name = unique("t")
    log.create_topics([TopicSpec(name=name, partitions=1, cleanup="compact", compaction_lag_ms=3_600_000)])
    producer = log.producer(unique("p"))
    produce(producer, name, [b"a"])
    produce(producer, name, [b"b"])
    handles.maintain(log, time.time())
    assert read_values(log, name) == [b"a", b"b"]
