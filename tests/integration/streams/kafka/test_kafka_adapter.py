"""What only Kafka can get wrong: control markers, open transactions, both group protocols, bounded memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from laminar.schemas.errors import Aborted, DeadlineExceeded, EncodeError, Evicted, Fenced, OffsetOutOfRange
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.kafka.consumer import KafkaConsumer
from laminar.streams.kafka.producer import KafkaProducer
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.partitioner import partition_of
from tests.integration.streams.log_contract.driving import (
    WAIT_S,
    commit,
    poll_some,
    produce,
    read_records,
    read_values,
    settle,
    until_true,
)
from tests.support.broker import SESSION_S

pytestmark = pytest.mark.kafka

Unique = Callable[[str], str]
Make = Callable[..., KafkaLog]


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def flush(producer: KafkaProducer) -> None:
    """What was sent stands on the broker, uncommitted."""
    assert producer._client is not None
    producer._client.flush(WAIT_S)


def send_offsets(producer: KafkaProducer, consumer: KafkaConsumer, offsets: dict[TopicPartition, int]) -> None:
    """The offsets stand on the broker, uncommitted."""
    assert producer._client is not None
    deadline = Deadline.after(WAIT_S, "offsets are sent")
    producer._send_offsets(producer._client, consumer.membership(), offsets, deadline)


def test_keys_go_where_our_own_murmur2_says(log: KafkaLog, unique: Unique) -> None:
    name, keys = unique("t"), [b"", b"a", b"9f3a/0/17", b"9f3a/0/17/3", "ключ".encode(), bytes(range(33))]
    log.create_topics([TopicSpec(name=name, partitions=5)])
    with log.producer(unique("p")).transaction() as tx:
        for key in keys:
            tx.send(OutRecord(topic=name, key=key, value=b"x"))
    found = {r.key: r.partition for p in range(5) for r in read_records(log, name, p)}
    assert found == {key: partition_of(key, 5) for key in keys}


def test_lag_is_exact_although_markers_and_aborted_records_take_offsets(
    log: KafkaLog, topic: str, unique: Unique
) -> None:
    group, producer, where = unique("g"), log.producer(unique("p")), TopicPartition(topic, 0)
    for value in (b"a", b"b", b"c"):
        produce(producer, topic, [value])

    def abort() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic=topic, key=b"k", value=b"lost", partition=0))
            flush(producer)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        abort()
    assert log.reader().bounds(where).end == 8
    assert log.lag(group, topic) == {where: 3, TopicPartition(topic, 1): 0}
    last = read_records(log, topic)[-1]
    consumer = log.consumer(group, [topic])
    poll_some(consumer, 3)
    commit(producer, consumer, {where: last.offset + 1})
    assert log.lag(group, topic) == {where: 0, TopicPartition(topic, 1): 0}


def test_s5_readers_go_on_as_soon_as_the_dead_owners_successor_starts(
    log: KafkaLog, make_log: Make, topic: str, unique: Unique
) -> None:
    name, where = unique("p"), TopicPartition(topic, 0)
    dead = log.producer(name)
    block = dead.transaction()
    tx = block.__enter__()
    tx.send(OutRecord(topic=topic, key=b"k", value=b"never", partition=0))
    flush(dead)
    produce(make_log().producer(unique("other")), topic, [b"behind"])
    reader = log.reader()
    assert reader.bounds(where).end == 0
    make_log().producer(name)
    reader.assign({where: 0})
    assert [r.value for r in poll_some(reader, 1)] == [b"behind"]
    with pytest.raises(Fenced, match=name):
        block.__exit__(None, None, None)
    assert read_values(log, topic) == [b"behind"]


def test_s9_a_commit_that_races_a_rebalance_is_evicted_and_the_next_owner_reads_it_all(
    log: KafkaLog, make_log: Make, topic: str, unique: Unique
) -> None:
    group, out, producer = unique("g"), unique("out"), log.producer(unique("p"))
    log.create_topics([TopicSpec(name=out, partitions=1)])
    for partition in (0, 1):
        produce(producer, topic, [b"a", b"b"], partition=partition)
    first = log.consumer(group, [topic])
    records = settle([first], lambda: len(first.assignment()) == 2, "both")
    records += poll_some(first, 4 - len(records)) if len(records) < 4 else []
    second = make_log().consumer(group, [topic])
    moved: list[TopicPartition] = []

    def race() -> None:
        with producer.transaction() as tx:
            for record in records:
                tx.send(OutRecord(topic=out, key=record.key, value=record.value))
            settle([first, second], lambda: len(second.assignment()) == 1, "the rebalance")
            moved.extend(second.assignment())
            tx.commit_offsets(first.membership(), {r.source: r.offset + 1 for r in records})

    with pytest.raises(Evicted, match="not assigned"):
        race()
    assert read_values(log, out) == []
    assert log.committed(group, topic) == {}
    second.seek(moved[0], 0)
    assert [r.value for r in poll_some(second, 2)] == [b"a", b"b"]


def test_a_group_waits_for_the_offsets_of_an_open_transaction_and_then_starts_behind_them(
    log: KafkaLog, make_log: Make, topic: str, unique: Unique
) -> None:
    group, producer, where = unique("g"), log.producer(unique("p")), TopicPartition(topic, 0)
    produce(producer, topic, [b"a", b"b"])
    first = log.consumer(group, [topic])
    records = poll_some(first, 2)
    block = producer.transaction()
    block.__enter__()
    send_offsets(producer, first, {where: records[0].offset + 1})
    first.close()
    second = make_log(request_timeout_s=0.2).consumer(group, [topic])
    settle([second], lambda: where in second.assignment(), "assigned")
    assert where not in second.position()
    assert second.poll(10, 0.3) == []
    assert log.committed(group, topic) == {}
    block.__exit__(None, None, None)
    assert [r.value for r in poll_some(second, 1)] == [b"b"]


def test_a_group_that_never_committed_starts_at_the_beginning_also_behind_an_aborted_commit(
    log: KafkaLog, make_log: Make, topic: str, unique: Unique
) -> None:
    group, producer, where = unique("g"), log.producer(unique("p")), TopicPartition(topic, 0)
    produce(producer, topic, [b"a", b"b"])
    first = log.consumer(group, [topic])
    poll_some(first, 2)
    block = producer.transaction()
    block.__enter__()
    send_offsets(producer, first, {where: 1})
    first.close()
    second = make_log(request_timeout_s=0.2).consumer(group, [topic])
    settle([second], lambda: where in second.assignment(), "assigned")
    assert not block.__exit__(RuntimeError, RuntimeError("the work failed"), None)
    assert [r.value for r in poll_some(second, 2)] == [b"a", b"b"]


def test_a_group_whose_offset_retention_has_passed_is_told_and_not_silently_reset(
    log: KafkaLog, unique: Unique
) -> None:
    group, name, producer = unique("g"), unique("t"), log.producer(unique("p"))
    log.create_topics([TopicSpec(name=name, partitions=1, retention_bytes=300_000, max_record_bytes=200_000)])
    where = TopicPartition(name, 0)
    produce(producer, name, [os.urandom(100_000)])
    consumer = log.consumer(group, [name])
    poll_some(consumer, 1)
    commit(producer, consumer, {where: 1})
    consumer.close()
    for _ in range(30):
        produce(producer, name, [os.urandom(100_000)])
    reader = log.reader()
    until_true(lambda: reader.bounds(where).start > 1, "retention")
    late = log.consumer(group, [name])

    def poll() -> None:
        settle([late], lambda: False, "never")

    with pytest.raises(OffsetOutOfRange, match=rf"{name}\[0\]@1 is wanted, readable is \d+ to \d+"):
        poll()


def test_seek_drops_what_was_fetched_ahead(log: KafkaLog, topic: str, unique: Unique) -> None:
    producer, where = log.producer(unique("p")), TopicPartition(topic, 0)
    produce(producer, topic, [b"%d" % i for i in range(300)])
    consumer = log.consumer(unique("g"), [topic])
    for start in range(0, 280, 28):
        records = poll_some(consumer, 1)
        consumer.seek(where, start)
        records = consumer.poll(5, WAIT_S)
        assert [r.offset for r in records] == list(range(start, start + len(records)))


def test_what_a_callback_raises_poll_raises_and_no_record_is_lost(log: KafkaLog, topic: str, unique: Unique) -> None:
    produce(log.producer(unique("p")), topic, [b"a", b"b"])
    complaints = [ValueError("no")]

    def complain(_: frozenset[TopicPartition]) -> None:
        if complaints:
            raise complaints.pop()

    consumer = log.consumer(unique("g"), [topic], on_assign=complain)

    def poll() -> None:
        settle([consumer], lambda: False, "never")

    with pytest.raises(ValueError, match="no"):
        poll()
    assert [r.value for r in poll_some(consumer, 2)] == [b"a", b"b"]


def test_a_restarted_instance_keeps_its_partitions_and_while_it_lives_another_of_its_name_waits(
    make_log: Make, topic: str, unique: Unique
) -> None:
    group = unique("g")
    old, other = (make_log().consumer(group, [topic], instance=name) for name in ("rollout-0", "rollout-1"))
    settle([old, other], lambda: len(old.assignment()) == len(other.assignment()) == 1, "one each")
    owned = old.assignment()
    second = make_log().consumer(group, [topic], instance="rollout-0")
    end = time.monotonic() + 2 * SESSION_S
    settle([old, other, second], lambda: time.monotonic() > end, "a while")
    assert (old.assignment(), second.assignment()) == (owned, frozenset())
    old.close()
    settle([other, second], lambda: second.assignment() == owned, "its partition is back, or that of a session's end")


def test_classic_protocol_members_share_and_hand_over(make_log: Make, topic: str, unique: Unique) -> None:
    group, log = unique("g"), make_log(group_protocol="classic")
    producer = log.producer(unique("p"))
    first, second = log.consumer(group, [topic]), log.consumer(group, [topic])
    settle([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 1, "one each")
    stale = first.membership()
    commit(producer, first, dict.fromkeys(first.assignment(), 1))
    second.close()
    settle([first], lambda: len(first.assignment()) == 2, "both again")

    def late() -> None:
        with producer.transaction() as tx:
            tx.commit_offsets(stale, dict.fromkeys(stale.token.owned, 1))

    with pytest.raises(Evicted):
        late()


def test_s15_a_producer_faster_than_the_broker_waits_bounded_and_then_is_told(
    broker: Broker, make_log: Make, topic: str, unique: Unique
) -> None:
    small = {"queue.buffering.max.kbytes": 1024, "queue.buffering.max.messages": 1000}
    log = make_log(client=small, request_timeout_s=8.0)
    producer = log.producer(unique("p"))
    produce(producer, topic, [b"first"])
    sent = 0

    def flood() -> None:
        nonlocal sent
        with producer.transaction(timeout_s=0.5) as tx:
            while True:
                tx.send(OutRecord(topic=topic, key=b"k", value=b"x" * 10_000, partition=0))
                sent += 1

    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match=r"room in the send queue: not within 0\.5 s"):
            flood()
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert sent <= 110
    produce(producer, topic, [b"second"])
    assert read_values(log, topic) == [b"first", b"second"]


def test_s13_a_slow_consumer_of_a_large_backlog_stays_within_its_memory(
    log: KafkaLog, topic: str, unique: Unique
) -> None:
    producer = log.producer(unique("p"))
    for _ in range(8):
        produce(producer, topic, [os.urandom(1_000_000) for _ in range(20)])
    consumer = log.consumer(unique("slow"), [topic])
    poll_some(consumer, 1)
    before = _resident_mb()
    for _ in range(20):
        consumer.poll(1, 0.05)
    assert _resident_mb() - before < 64


@pytest.mark.parametrize("visible", [True, False])
def test_what_only_the_broker_can_refuse_is_told_and_nothing_of_it_is_visible(
    log: KafkaLog, unique: Unique, visible: bool
) -> None:
    name, producer = unique("strict"), log.producer(unique("p"))
    log.create_topics([TopicSpec(name=name, partitions=1, cleanup="compact")])
    produce(producer, name, [b"first"])

    def without_key() -> None:
        with producer.transaction(visible=visible) as tx:
            tx.send(OutRecord(topic=name, key=b"k", value=b"companion"))
            tx.send(OutRecord(topic=name, key=None, value=b"x"))

    def refused() -> None:
        deadline = Deadline.after(WAIT_S, "the broker refuses")
        while not deadline.passed:
            with suppress(Aborted):  # librdkafka may need a transaction to find its sequence numbers again
                without_key()

    def refused_before_the_end() -> None:
        with producer.transaction(visible=visible) as tx:
            tx.send(OutRecord(topic=name, key=None, value=b"x"))
            deadline = Deadline.after(WAIT_S, "a send is refused")
            while not deadline.passed:
                time.sleep(0.1)
                tx.send(OutRecord(topic=name, key=b"k", value=b"behind"))

    with pytest.raises(EncodeError, match=unique("p")):
        refused()
    with suppress(Aborted):
        produce(producer, name, [b"between"])
    produce(producer, name, [b"between"])
    with pytest.raises(EncodeError, match=unique("p")):
        refused_before_the_end()
    with suppress(Aborted):
        produce(producer, name, [b"last"])
    produce(producer, name, [b"last"])
    assert set(read_values(log, name)) == {b"first", b"between", b"last"}


def test_a_record_just_below_the_limit_and_many_small_ones_pass_a_small_topic(log: KafkaLog, unique: Unique) -> None:
    name, producer = unique("small"), log.producer(unique("p"))
    log.create_topics([TopicSpec(name=name, partitions=1, max_record_bytes=3_000)])
    values = [os.urandom(2_999), *(os.urandom(700) for _ in range(50)), os.urandom(2_999)]
    produce(producer, name, values)
    assert read_values(log, name) == values
