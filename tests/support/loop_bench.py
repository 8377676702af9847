"""Exactly-once loops over one memory log, with a clock, faults and workers that a test drives by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, OutRecord, Producer, TopicPartition, TopicSpec
from laminar.streams.loop import Loop
from laminar.streams.memory import MemoryBroker, MemoryLog, NoFaults, Point
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Function, Inline, Result, Worker
from tests.support import sample

CODEC = Codec()
IN, OUT = "trajectories.completed", "trajectories.scored"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Script(NoFaults):
    """Raises what the test has put in, once each, at the given points."""

    def __init__(self) -> None:
        self.plan: list[tuple[Point, BaseException]] = []

    def at(self, point: Point, transactional_id: str) -> None:
        if self.plan and self.plan[0][0] == point:
            raise self.plan.pop(0)[1]


class Setup:
    """One memory log and loops over it."""

    def __init__(self, partitions: int = 1, specs: Sequence[TopicSpec] | None = None) -> None:
        self.clock = Clock()
        self.broker = MemoryBroker(self.clock)
        self.log = MemoryLog(clock=self.clock, broker=self.broker)
        self.log.create_topics(specs or topic_specs({IN: partitions, OUT: partitions}))
        self.faults = Script()

    def loop(
        self, worker: Worker | Function, instance: str = "reward-0", log: Log | None = None, **settings: object
    ) -> Loop:
        return Loop(
            log=log or MemoryLog(clock=self.clock, broker=self.broker, faults=self.faults),
            codec=CODEC,
            name="reward",
            group="run.reward",
            instance=instance,
            transactional_id=f"run.{instance}",
            topics=[IN],
            worker=Inline(worker) if callable(worker) else worker,
            **settings,  # type: ignore[arg-type]
        )

    def write(self, *records: r.Record | bytes, partition: int | None = 0) -> None:
        with self.log.producer("writer").transaction() as tx:
            for record in records:
                if isinstance(record, bytes):
                    tx.send(OutRecord(topic=IN, key=b"data/0/9", value=record, partition=partition))
                else:
                    tx.send(outgoing(CODEC, record, partition=partition))

    def run(self, loop: Loop, steps: int = 50) -> None:
        for _ in range(steps):
            loop.step(self.clock.now)
            self.clock.now += 0.01

    def read(self, topic: str) -> list[r.Record]:
        deadline = Deadline.after(5, "read")
        return [CODEC.decode(record.value or b"") for record in read_topic(self.log, topic, deadline)]

    def scored(self) -> list[str]:
        return [x.trajectory.trajectory_id for x in self.read(OUT) if isinstance(x, r.ScoredTrajectory)]

    def dead(self) -> list[r.DeadLetter]:
        return [x for x in self.read("dead.letters") if isinstance(x, r.DeadLetter)]

    def committed(self, partition: int = 0) -> int | None:
        return self.log.committed("run.reward", IN).get(TopicPartition(IN, partition))


def score(record: r.Record) -> list[r.Record]:
    assert isinstance(record, r.CompletedTrajectory)
    return [sample.scored(record)]


def group(n: int) -> list[r.CompletedTrajectory]:
    return [sample.completed(sample.prompt(index), 0) for index in range(n)]


def ids(records: Sequence[r.CompletedTrajectory]) -> list[str]:
    return [record.trajectory_id for record in records]


class Manual:
    """A worker whose calls the test ends by hand, in any order."""

    def __init__(self, function: Function = score) -> None:
        self.function = function
        self.called = 0
        self.tickets: dict[str, int] = {}
        self.calls: dict[int, r.Record] = {}
        self.finished: list[Result] = []
        self.cancelled: list[int] = []

    def submit(self, ticket: int, record: r.Record) -> None:
        assert isinstance(record, r.CompletedTrajectory)
        self.calls[ticket] = record
        self.called += 1
        self.tickets[record.trajectory_id] = ticket

    def finish(self, which: Callable[[r.Record], bool] = lambda _: True) -> None:
        for ticket in [t for t, record in self.calls.items() if which(record)]:
            self.finished.append(Result(ticket=ticket, outputs=tuple(self.function(self.calls.pop(ticket)))))

    def collect(self) -> list[Result]:
        done, self.finished = self.finished, []
        return done

    def cancel(self, ticket: int) -> None:
        self.calls.pop(ticket, None)
        self.cancelled.append(ticket)

    def close(self) -> None:
        self.calls.clear()


class Slow(Manual):
    """Ends its calls when it has been asked for results often enough."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def collect(self) -> list[Result]:
        self.left -= 1
        if self.left <= 0:
            self.finish()
        return super().collect()


class AwayLog(MemoryLog):
    """A log whose broker does not answer to a producer, while there is a reason."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(clock=setup.clock, broker=setup.broker, faults=setup.faults)
        self.reason = ""

    def producer(self, transactional_id: str) -> Producer:
        if self.reason:
            raise Unavailable(self.reason)
        return super().producer(transactional_id)
