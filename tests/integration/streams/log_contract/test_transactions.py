"""Transactions: order, atomic visibility, abort, fencing, limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.schemas.errors import Aborted, Evicted, Fenced, RecordTooLarge, UnknownTopic
from laminar.streams.log import Log, Membership, OutRecord, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import (
    WAIT_S,
    commit,
    poll_some,
    produce,
    read_records,
    read_values,
    settle,
)

Unique = Callable[[str], str]
Open = Callable[[], Log]


def test_records_of_a_partition_are_read_in_the_order_they_were_committed(log: Log, topic: str, unique: Unique) -> None:
    producer = log.producer(unique("p"))
    expected: dict[int, list[bytes]] = {0: [], 1: []}
    for batch in range(5):
        with producer.transaction() as tx:
            for i in range(20):
                partition = (batch + i) % 2
                value = f"{batch}/{i}".encode()
                expected[partition].append(value)
                tx.send(OutRecord(topic=topic, key=b"k", value=value, partition=partition))
    for partition, values in expected.items():
        records = read_records(log, topic, partition)
        assert [r.value for r in records] == values
        offsets = [r.offset for r in records]
        assert offsets == sorted(set(offsets))


def test_a_record_keeps_key_headers_timestamp_and_null_value(log: Log, single: str, unique: Unique) -> None:
    with log.producer(unique("p")).transaction() as tx:
        tx.send(
            OutRecord(
                topic=single,
                key="ключ".encode(),
                value=b"\x00\xff",
                headers=(("a", b"1"), ("b", b""), ("a", b"2")),
                timestamp_ms=1_700_000_000_123,
            )
        )
        tx.send(OutRecord(topic=single, key=None, value=None))
    first, second = read_records(log, single)
    assert first.key == "ключ".encode()
    assert first.value == b"\x00\xff"
    assert first.headers == (("a", b"1"), ("b", b""), ("a", b"2"))
    assert first.timestamp_ms == 1_700_000_000_123
    assert (second.key, second.value, second.headers) == (None, None, ())
    assert second.timestamp_ms > 1_700_000_000_123


def test_a_key_goes_to_kafkas_partition_and_null_keys_to_all_in_turn(log: Log, topic: str, unique: Unique) -> None:
    with log.producer(unique("p")).transaction() as tx:
        for key in (b"21", b"foobar", b"abc", b"a-little-bit-long-string"):
            tx.send(OutRecord(topic=topic, key=key, value=b"x"))
        for _ in range(4):
            tx.send(OutRecord(topic=topic, key=None, value=b"x"))
    keys = {p: [r.key for r in read_records(log, topic, p)] for p in (0, 1)}
    assert [k for k in keys[0] if k] == [b"21", b"foobar", b"a-little-bit-long-string"]
    assert [k for k in keys[1] if k] == [b"abc"]
    assert keys[0].count(None) == 2
    assert keys[1].count(None) == 2


def test_a_transaction_over_topics_and_offsets_is_visible_at_once_and_only_after_it(
    open_log: Open, log: Log, topic: str, single: str, unique: Unique
) -> None:
    other, group = open_log(), unique("g")
    produce(log.producer(unique("in")), topic, [b"in"])
    consumer = log.consumer(group, [topic])
    (record,) = poll_some(consumer, 1)
    reader = other.reader()
    reader.assign({TopicPartition(single, 0): 0})
    with log.producer(unique("p")).transaction() as tx:
        tx.send(OutRecord(topic=single, key=b"k", value=b"out"))
        tx.send(OutRecord(topic=topic, key=b"k", value=b"back", partition=1))
        tx.commit_offsets(consumer.membership(), {record.source: record.offset + 1})
        assert reader.poll(10, 0.1) == []
        assert read_values(other, topic, 1) == []
        assert other.committed(group, topic) == {}
    assert [r.value for r in poll_some(reader, 1)] == [b"out"]
    assert read_values(other, topic, 1) == [b"back"]
    assert other.committed(group, topic) == {record.source: record.offset + 1}


def test_a_transaction_that_raises_leaves_nothing(log: Log, topic: str, single: str, unique: Unique) -> None:
    group, producer = unique("g"), log.producer(unique("p"))
    produce(producer, topic, [b"in"])
    consumer = log.consumer(group, [topic])
    (record,) = poll_some(consumer, 1)

    def fail() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic=single, key=b"k", value=b"lost"))
            tx.commit_offsets(consumer.membership(), {record.source: record.offset + 1})
            raise RuntimeError("the work failed")

    with pytest.raises(RuntimeError, match="the work failed"):
        fail()
    assert log.committed(group, topic) == {}
    produce(producer, single, [b"kept"])
    assert read_values(log, single) == [b"kept"]
    consumer.seek(record.source, record.offset)
    assert poll_some(consumer, 1) == [record]


def test_an_older_producer_of_the_same_id_is_fenced(open_log: Open, log: Log, single: str, unique: Unique) -> None:
    name = unique("p")
    old = log.producer(name)
    produce(old, single, [b"old"])
    new = open_log().producer(name)
    with pytest.raises(Fenced, match=name):
        produce(old, single, [b"zombie"])
    produce(new, single, [b"new"])
    assert read_values(log, single) == [b"old", b"new"]


def test_s5_a_producer_that_is_replaced_inside_its_transaction_loses_it_and_holds_nobody_up(
    open_log: Open, log: Log, single: str, unique: Unique
) -> None:
    name = unique("p")
    old = log.producer(name)

    def zombie() -> None:
        with old.transaction() as tx:
            tx.send(OutRecord(topic=single, key=b"k", value=b"zombie"))
            produce(open_log().producer(name), single, [b"new"])
            assert read_values(log, single) == [b"new"]

    with pytest.raises(Fenced, match=name):
        zombie()
    assert read_values(log, single) == [b"new"]


def test_s9_a_member_that_lost_the_partition_cannot_commit(
    open_log: Open, log: Log, topic: str, single: str, unique: Unique
) -> None:
    group = unique("g")
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"a"], partition=0)
    produce(producer, topic, [b"b"], partition=1)
    first = log.consumer(group, [topic])
    settle([first], lambda: len(first.assignment()) == 2, "the first member owns both partitions")
    stale = first.membership()
    second = open_log().consumer(group, [topic])
    settle([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 1, "one each")
    (moved,) = second.assignment()

    def late() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic=single, key=b"k", value=b"late"))
            tx.commit_offsets(stale, {moved: 1})

    with pytest.raises((Evicted, Aborted)):
        late()
    assert read_values(log, single) == []
    assert moved not in log.committed(group, topic)
    commit(producer, second, {moved: 1})
    assert log.committed(group, topic)[moved] == 1


def test_offsets_of_a_group_without_members_are_committed_by_anyone(log: Log, topic: str, unique: Unique) -> None:
    group, where = unique("g"), TopicPartition(topic, 1)
    produce(log.producer(unique("in")), topic, [b"a", b"b"], partition=1)
    with log.producer(unique("p")).transaction() as tx:
        tx.commit_offsets(Membership(group), {where: 1})
    assert log.committed(group, topic) == {where: 1}


def test_s8_a_record_above_the_topics_limit_is_refused_before_it_is_sent(log: Log, topic: str, unique: Unique) -> None:
    small, group = unique("small"), unique("g")
    log.create_topics([TopicSpec(name=small, partitions=1, max_record_bytes=2000)])
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"in"])
    consumer = log.consumer(group, [topic])
    (record,) = poll_some(consumer, 1)

    def too_large() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic=small, key=b"k", value=b"fits"))
            tx.commit_offsets(consumer.membership(), {record.source: record.offset + 1})
            tx.send(OutRecord(topic=small, key=b"k", value=b"x" * 2000))

    with pytest.raises(RecordTooLarge, match=f"{small}.*2000"):
        too_large()
    assert read_values(log, small) == []
    assert log.committed(group, topic) == {}
    produce(producer, small, [b"x" * 1500])
    assert read_values(log, small) == [b"x" * 1500]


def test_large_values_come_back_whole(log: Log, single: str, unique: Unique) -> None:
    values = [bytes([i]) * (70_000 + 300_000 * i) for i in range(4)] + [b"small", b""]
    producer = log.producer(unique("p"))
    produce(producer, single, values)
    produce(producer, single, values[::-1])
    assert read_values(log, single) == values + values[::-1]


def test_writing_to_an_unknown_topic_creates_none(log: Log, single: str, unique: Unique) -> None:
    producer, absent = log.producer(unique("p")), unique("absent")

    def misdirected(partition: int | None, name: str) -> None:
        with producer.transaction(timeout_s=WAIT_S) as tx:
            tx.send(OutRecord(topic=single, key=b"k", value=b"lost"))
            tx.send(OutRecord(topic=name, key=b"k", value=b"x", partition=partition))

    with pytest.raises(UnknownTopic, match=absent):
        misdirected(None, absent)
    with pytest.raises(UnknownTopic, match=single):
        misdirected(7, single)
    assert absent not in log.topics()
    assert read_values(log, single) == []
