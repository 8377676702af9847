"""Readers: bounded and live, by offset and by time, and what is out of range."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from laminar.schemas.errors import DeadlineExceeded, OffsetOutOfRange, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, OutRecord, TopicPartition
from laminar.streams.reading import Tail, read_topic
from tests.integration.streams.log_contract.driving import WAIT_S, poll_some, produce, read_records

Unique = Callable[[str], str]
Open = Callable[[], Log]


def test_a_bounded_read_stops_at_the_end_as_it_was(log: Log, topic: str, unique: Unique) -> None:
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"a", b"b"], partition=0)
    produce(producer, topic, [b"c"], partition=1)
    found = []
    for record in read_topic(log, topic, Deadline.after(WAIT_S, "read")):
        if not found:
            produce(producer, topic, [b"later"], partition=0)
            produce(producer, topic, [b"later"], partition=1)
        found.append(record.value)
    assert sorted(v for v in found if v) == [b"a", b"b", b"c"]


def test_position_reaches_the_end_also_behind_an_aborted_transaction(log: Log, single: str, unique: Unique) -> None:
    producer, where = log.producer(unique("p")), TopicPartition(single, 0)
    produce(producer, single, [b"a"])

    def aborted() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic=single, key=b"k", value=b"x"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        aborted()
    reader = log.reader()
    reader.assign({where: 0})
    records = poll_some(reader, 1)
    assert [r.value for r in records] == [b"a"]
    deadline = Deadline.after(WAIT_S, "position reaches the end")
    while reader.position()[where] < reader.bounds(where).end:
        deadline.check()
        assert reader.poll(10, 0.1) == []


def test_a_live_read_gets_what_another_handle_writes_while_it_waits(
    open_log: Open, log: Log, single: str, unique: Unique
) -> None:
    other = open_log()
    reader = log.reader()
    reader.assign({TopicPartition(single, 0): 0})
    assert reader.poll(10, 0.0) == []
    writer = threading.Timer(0.1, lambda: produce(other.producer(unique("p")), single, [b"live"]))
    writer.start()
    assert [r.value for r in reader.poll(10, WAIT_S)] == [b"live"]
    writer.join()


def test_seek_by_offset(log: Log, single: str, unique: Unique) -> None:
    produce(log.producer(unique("p")), single, [f"{i}".encode() for i in range(10)])
    records = read_records(log, single)
    where = TopicPartition(single, 0)
    reader = log.reader()
    reader.assign({where: records[7].offset})
    assert [r.value for r in poll_some(reader, 3)] == [b"7", b"8", b"9"]
    reader.seek(where, records[2].offset)
    assert poll_some(reader, 8) == records[2:]


def test_seek_by_time(log: Log, single: str, unique: Unique) -> None:
    with log.producer(unique("p")).transaction() as tx:
        for i in range(5):
            tx.send(OutRecord(topic=single, key=b"k", value=b"%d" % i, timestamp_ms=1_700_000_000_000 + 1000 * i))
    where = TopicPartition(single, 0)
    records = read_records(log, single)
    reader = log.reader()
    assert reader.offset_at(where, 0) == records[0].offset
    assert reader.offset_at(where, 1_700_000_002_000) == records[2].offset
    assert reader.offset_at(where, 1_700_000_002_001) == records[3].offset
    behind = reader.offset_at(where, 1_700_000_004_001)
    assert records[-1].offset < behind <= reader.bounds(where).end
    reader.assign({where: behind})
    assert reader.poll(10, 0.1) == []


def test_an_offset_that_the_log_does_not_have_is_an_error_with_both_numbers(
    log: Log, single: str, unique: Unique
) -> None:
    produce(log.producer(unique("p")), single, [b"a"])
    reader = log.reader()
    reader.assign({TopicPartition(single, 0): 1000})

    def poll() -> None:
        deadline = Deadline.after(WAIT_S, "out of range")
        while not deadline.passed:
            reader.poll(10, 0.1)

    with pytest.raises(OffsetOutOfRange, match=rf"{single}\[0\].*1000"):
        poll()


def test_a_reader_of_an_unknown_topic_is_refused(log: Log, single: str, unique: Unique) -> None:
    reader, absent = log.reader(), unique("absent")
    with pytest.raises(UnknownTopic, match=absent):
        reader.bounds(TopicPartition(absent, 0))
    with pytest.raises(UnknownTopic, match=single):
        reader.bounds(TopicPartition(single, 9))
    with pytest.raises(UnknownTopic, match=absent):
        list(read_topic(log, absent, Deadline.after(WAIT_S, "read")))


def test_a_tail_follows_from_the_beginning_and_from_the_end(log: Log, topic: str, unique: Unique) -> None:
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"old"], partition=0)
    everything, news = Tail(log, [topic]), Tail(log, [topic], start="end")
    assert [r.value for r in everything.catch_up(Deadline.after(WAIT_S, "catch up"))] == [b"old"]
    assert set(everything.behind().values()) == {0}
    produce(producer, topic, [b"new"], partition=1)
    for tail in (everything, news):
        assert [r.value for r in tail.catch_up(Deadline.after(WAIT_S, "catch up"))] == [b"new"]
        tail.close()


def test_a_bounded_read_that_takes_too_long_says_where_it_stands(log: Log, single: str, unique: Unique) -> None:
    produce(log.producer(unique("p")), single, [b"a"])
    late = Deadline.after(-1.0, "read")
    with pytest.raises(DeadlineExceeded, match="read: not within"):
        for _ in Tail(log, [single]).catch_up(late):
            pass
