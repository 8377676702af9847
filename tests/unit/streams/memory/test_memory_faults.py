"""What a simulation can do to the memory log: leave a transaction undecided, stop a producer inside one, go away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from laminar.schemas.errors import Fenced, Unavailable
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.memory import MemoryBroker, MemoryLog, NoFaults, Point, Undecided

AT = TopicPartition("t", 0)


class At(NoFaults):
    """Does something at one point."""

    def __init__(self, point: Point, act: Callable[[], None]) -> None:
        self.point = point
        self.act = act
        self.is_away = False

    def at(self, point: Point, transactional_id: str) -> None:
        if point == self.point:
            self.act()

    def away(self) -> bool:
        return self.is_away


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def shared(clock: Clock) -> MemoryBroker:
    broker = MemoryBroker(clock)
    MemoryLog(broker=broker).create_topics([TopicSpec(name="t", partitions=1)])
    return broker


def write(log: MemoryLog, value: bytes = b"a") -> None:
    with log.producer("p").transaction() as tx:
        tx.send(OutRecord(topic="t", key=b"k", value=value))


def seen(log: MemoryLog) -> list[bytes | None]:
    reader = log.reader()
    reader.assign({AT: 0})
    return [record.value for record in reader.poll(10, 0.0)]


def undecided(broker: MemoryBroker, *, commits: bool) -> None:
    def act() -> None:
        raise Undecided("no answer", commits=commits, due=1_005.0)

    with pytest.raises(Unavailable):
        write(MemoryLog(broker=broker, faults=At("inside_commit", act)))


@pytest.mark.parametrize(("commits", "then"), [(True, [b"a"]), (False, [])])
def test_s5_an_undecided_transaction_is_decided_when_it_is_due(commits: bool, then: list[bytes]) -> None:
    clock = Clock()
    broker = shared(clock)
    undecided(broker, commits=commits)
    assert seen(MemoryLog(broker=broker)) == []
    clock.now = 1_005.0
    assert seen(MemoryLog(broker=broker)) == then


@pytest.mark.parametrize(("commits", "then"), [(True, [b"a", b"b"]), (False, [b"b"])])
def test_s5_the_successor_waits_for_the_decision(commits: bool, then: list[bytes]) -> None:
    broker = shared(Clock())
    undecided(broker, commits=commits)
    write(MemoryLog(broker=broker), b"b")
    assert seen(MemoryLog(broker=broker)) == then


def test_b12_a_producer_that_slept_inside_its_commit_is_fenced_when_a_successor_came() -> None:
    broker = shared(Clock())
    log = MemoryLog(broker=broker, faults=At("inside_commit", lambda: write(MemoryLog(broker=broker), b"b")))
    with pytest.raises(Fenced):
        write(log)
    assert seen(MemoryLog(broker=broker)) == [b"b"]


def test_nobody_reads_offsets_while_a_transaction_that_carries_some_is_open() -> None:
    broker = shared(Clock())
    write(MemoryLog(broker=broker))

    def act() -> None:
        raise Undecided("no answer", commits=True, due=2_000.0)

    log = MemoryLog(broker=broker, faults=At("inside_commit", act))
    consumer = MemoryLog(broker=broker).consumer("g", ["t"])
    consumer.poll(10, 0.0)
    with suppress(Unavailable), log.producer("q").transaction() as tx:
        tx.commit_offsets(consumer.membership(), {AT: 1})
    consumer.close()
    successor = MemoryLog(broker=broker).consumer("g", ["t"])
    assert successor.poll(10, 0.0) == []
    assert successor.position() == {AT: 1}


def test_a_broker_that_is_away_answers_no_request_and_polls_return_nothing() -> None:
    broker = shared(Clock())
    write(MemoryLog(broker=broker))
    faults = At("before_commit", lambda: None)
    log = MemoryLog(broker=broker, faults=faults)
    consumer, producer = log.consumer("g", ["t"]), log.producer("q")
    faults.is_away = True
    assert consumer.poll(10, 0.0) == []

    def commit() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic="t", key=b"k", value=b"lost"))

    for request in (commit, lambda: log.producer("r"), lambda: log.reader().bounds(AT), lambda: log.lag("g", "t")):
        with pytest.raises(Unavailable):
            request()
    faults.is_away = False
    assert [record.value for record in consumer.poll(10, 0.0)] == [b"a"]


def test_a_call_that_would_wait_lets_a_simulation_pass_the_time() -> None:
    clock = Clock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    reader = MemoryLog(broker=shared(clock), sleep=sleep).reader()
    reader.assign({AT: 0})
    assert reader.poll(10, 1.5) == []
    assert sum(slept) == pytest.approx(1.5)
