"""What only the memory log has: its clock and its faults are the test's."""

from __future__ import annotations

import pytest

from laminar.schemas.errors import Evicted, Unavailable
from laminar.streams.log import LogRecord, OutRecord, TopicPartition, TopicSpec
from laminar.streams.memory import MemoryBroker, MemoryLog, NoFaults, Point

T = TopicPartition("t", 0)


class Crash(BaseException):
    """What a simulator raises to kill a process."""


class Script(NoFaults):
    """Raises once at a point."""

    def __init__(self, point: Point, error: BaseException) -> None:
        self.point, self.error = point, error
        self.armed = True

    def at(self, point: Point, transactional_id: str) -> None:
        if point == self.point and self.armed:
            self.armed = False
            raise self.error


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def broker(clock: Clock, partitions: int = 1) -> MemoryBroker:
    made = MemoryBroker(clock)
    MemoryLog(broker=made).create_topics([TopicSpec(name="t", partitions=partitions)])
    return made


def write(log: MemoryLog, value: bytes, name: str = "p") -> None:
    with log.producer(name).transaction() as tx:
        tx.send(OutRecord(topic="t", key=b"k", value=value))


def read(log: MemoryLog) -> list[LogRecord]:
    reader = log.reader()
    reader.assign({T: 0})
    return reader.poll(100, 60.0)


def test_time_stands_still_unless_the_test_moves_it() -> None:
    clock = Clock()
    log = MemoryLog(broker=broker(clock))
    assert read(log) == []
    write(log, b"a")
    clock.now += 5
    write(log, b"b")
    assert [r.timestamp_ms for r in read(log)] == [1_000_000, 1_005_000]


def test_a_session_ends_by_the_injected_clock() -> None:
    clock = Clock()
    shared = broker(clock, partitions=2)
    dead, alive = (MemoryLog(broker=shared, session_timeout_s=10.0).consumer("g", ["t"]) for _ in range(2))
    for consumer in (dead, alive, dead, alive):
        consumer.poll(10, 0.0)
    assert len(dead.assignment()) == len(alive.assignment()) == 1
    membership, offsets = dead.membership(), dead.position()
    clock.now += 9
    alive.poll(10, 0.0)
    assert len(alive.assignment()) == 1
    clock.now += 4
    alive.poll(10, 0.0)
    assert len(alive.assignment()) == 2
    zombie = MemoryLog(broker=shared).producer("zombie")
    with pytest.raises(Evicted), zombie.transaction() as tx:
        tx.commit_offsets(membership, offsets)


def test_s5_a_crash_inside_the_commit_holds_readers_up_until_the_successor_starts() -> None:
    clock = Clock()
    shared = broker(clock)
    other = MemoryLog(broker=shared)
    with pytest.raises(Crash):
        write(MemoryLog(broker=shared, faults=Script("inside_commit", Crash())), b"lost", name="rollout-0")
    write(other, b"behind")
    assert read(other) == []
    MemoryLog(broker=shared).producer("rollout-0")
    assert [r.value for r in read(other)] == [b"behind"]


def test_a_transaction_whose_owner_never_returns_times_out() -> None:
    clock = Clock()
    shared = broker(clock)
    other = MemoryLog(broker=shared)
    with pytest.raises(Crash):
        write(MemoryLog(broker=shared, faults=Script("inside_commit", Crash())), b"lost", name="gone")
    write(other, b"behind")
    clock.now += 61
    assert [r.value for r in read(other)] == [b"behind"]


@pytest.mark.parametrize(("point", "visible"), [("before_commit", []), ("after_commit", [b"a"])])
def test_a_crash_before_or_after_the_commit_decides_what_is_visible(point: Point, visible: list[bytes]) -> None:
    shared = broker(Clock())
    with pytest.raises(Crash):
        write(MemoryLog(broker=shared, faults=Script(point, Crash())), b"a")
    assert [r.value for r in read(MemoryLog(broker=shared))] == visible


def test_an_error_inside_the_commit_aborts_and_the_next_transaction_works() -> None:
    shared = broker(Clock())
    log = MemoryLog(broker=shared, faults=Script("inside_commit", Unavailable("the broker is away")))
    producer = log.producer("p")

    def attempt() -> None:
        with producer.transaction() as tx:
            tx.send(OutRecord(topic="t", key=b"k", value=b"a"))

    with pytest.raises(Unavailable):
        attempt()
    assert read(log) == []
    attempt()
    assert [r.value for r in read(log)] == [b"a"]


def test_a_late_fetch_returns_nothing_yet_and_loses_nothing() -> None:
    class Late(NoFaults):
        on = True

        def late(self, who: str, partition: TopicPartition) -> bool:
            return self.on and who == "g/slow"

    shared, faults = broker(Clock()), Late()
    write(MemoryLog(broker=shared), b"a")
    consumer = MemoryLog(broker=shared, faults=faults).consumer("g", ["t"], instance="slow")
    assert consumer.poll(10, 0.0) == []
    faults.on = False
    assert [r.value for r in consumer.poll(10, 0.0)] == [b"a"]
