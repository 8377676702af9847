from __future__ import annotations

import time

import pytest

from laminar.schemas.errors import Evicted, Fenced, Unavailable, UnknownTopic
from laminar.streams.log import Membership, OutRecord, TopicPartition, TopicSpec
from laminar.streams.memory import MemoryBroker, MemoryLog
from laminar.streams.memory.faults import NoFaults, Point
from laminar.streams.meter import Histogram, Meter
from laminar.streams.metered import MeteredLog

IN, OUT = "trajectories.completed", "trajectories.scored"


class Mute(NoFaults):
    """The answer to each commit is lost while ``mute``."""

    mute = False

    def at(self, point: Point, transactional_id: str) -> None:
        if self.mute and point == "after_commit":
            raise Unavailable("no answer")


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryBroker(time.time)
    MemoryLog(broker=broker).create_topics(
        [
            TopicSpec(name=IN, partitions=2),
            TopicSpec(name=OUT, partitions=1),
            TopicSpec(name="rollouts.status", partitions=1),
        ]
    )
    return broker


def record(topic: str, value: bytes | None, partition: int = 0) -> OutRecord:
    return OutRecord(topic=topic, key=b"k", value=value, partition=partition)


def test_committed_records_and_bytes_are_counted_by_topic_and_aborted_ones_are_not(broker: MemoryBroker) -> None:
    meter = Meter()
    producer = MeteredLog(MemoryLog(broker=broker), meter).producer("p")
    with producer.transaction() as tx:
        tx.send(record(IN, b"12345"))
        tx.send(record(IN, None))
        tx.send(record(OUT, b"123"))
    with pytest.raises(UnknownTopic), producer.transaction() as tx:
        tx.send(record("nowhere", b"123"))
    assert (meter.written[IN].records, meter.written[IN].bytes) == (2, 5)
    assert (meter.written[OUT].records, meter.written[OUT].bytes) == (1, 3)
    assert (meter.begun, meter.outcomes["committed"], meter.outcomes["aborted"]) == (2, 1, 1)
    assert meter.commit_s.cumulative()[-1][1] == 1


def test_what_was_read_is_counted_with_assignments_positions_and_committed_offsets(broker: MemoryBroker) -> None:
    meter = Meter()
    log = MeteredLog(MemoryLog(broker=broker), meter)
    with log.producer("p").transaction() as tx:
        for partition in (0, 1):
            tx.send(record(IN, b"1234", partition))
    consumer = log.consumer("g", [IN])
    deadline = time.monotonic() + 30
    while meter.read[IN].records < 2:
        assert time.monotonic() < deadline
        consumer.poll(10, 0.05)
    both = frozenset({TopicPartition(IN, 0), TopicPartition(IN, 1)})
    group = meter.groups["g"]
    assert (meter.read[IN].records, meter.read[IN].bytes) == (2, 8)
    assert (group.topics, group.members, group.assigned, group.assignments) == ((IN,), 1, both, 1)
    assert set(meter.positions) == both
    with log.producer("q").transaction() as tx:
        tx.commit_offsets(consumer.membership(), {TopicPartition(IN, 0): 1})
    assert meter.committed == {("g", TopicPartition(IN, 0)): 1}
    other = MeteredLog(MemoryLog(broker=broker), Meter()).consumer("g", [IN])
    while not group.revocations:
        assert time.monotonic() < deadline
        other.poll(10, 0.01)
        consumer.poll(10, 0.01)
    assert len(group.assigned) == 1
    consumer.close()
    consumer.close()
    assert (group.members, group.assigned) == (0, frozenset())


def test_each_end_of_a_transaction_has_its_own_count(broker: MemoryBroker) -> None:
    meter, faults = Meter(), Mute()
    log = MeteredLog(MemoryLog(broker=broker, faults=faults), meter)
    producer = log.producer("p")
    member = log.consumer("g", [IN])
    member.poll(1, 0.0)
    left = member.membership()
    member.close()
    with pytest.raises(Evicted), producer.transaction() as tx:
        tx.commit_offsets(left, {TopicPartition(IN, 0): 1})
    faults.mute = True
    with pytest.raises(Unavailable), producer.transaction() as tx:
        tx.send(record(OUT, b"1"))
    faults.mute = False
    log.producer("p")
    with pytest.raises(Fenced), producer.transaction() as tx:
        tx.send(record(OUT, b"1"))
    ends = {name: n for name, n in meter.outcomes.items() if n}
    assert ends == {"evicted": 1, "unknown": 1, "fenced": 1}


def test_heartbeats_and_offsets_that_do_not_advance_are_no_progress(broker: MemoryBroker) -> None:
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    log = MeteredLog(MemoryLog(broker=broker), meter)
    producer, group, at = log.producer("p"), Membership("g"), TopicPartition(IN, 0)

    def progress(second: float, topic: str | None = None, offset: int | None = None) -> float:
        now[0] = second
        with producer.transaction() as tx:
            if topic is not None:
                tx.send(record(topic, b"1"))
            if offset is not None:
                tx.commit_offsets(group, {at: offset})
        return meter.progress_at

    assert progress(1.0, "rollouts.status") == 0.0
    assert progress(2.0, offset=5) == 2.0
    assert progress(3.0, offset=5) == 2.0
    assert progress(4.0, offset=4) == 2.0
    assert progress(5.0, OUT) == 5.0
    assert progress(6.0, "rollouts.status", offset=6) == 6.0


def test_a_value_on_a_bound_belongs_to_the_bucket_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert histogram.total == 12.0
