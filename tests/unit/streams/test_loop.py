from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Aborted, Evicted, Fenced, Retryable, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
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

    def loop(self, worker: Worker | Function, instance: str = "reward-0", **settings: object) -> Loop:
        return Loop(
            log=MemoryLog(clock=self.clock, broker=self.broker, faults=self.faults),
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
        self.calls: dict[int, r.Record] = {}
        self.finished: list[Result] = []
        self.cancelled: list[int] = []

    def submit(self, ticket: int, record: r.Record) -> None:
        self.calls[ticket] = record

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


def test_every_input_becomes_its_outputs_in_order_and_the_offset_follows() -> None:
    setup = Setup()
    records = group(5)
    setup.write(*records)
    loop = setup.loop(score)
    setup.run(loop)
    assert setup.scored() == ids(records)
    assert setup.committed() == 5
    assert (loop.counts.records, loop.counts.outputs, loop.counts.dead, loop.in_hand) == (5, 5, 0, 0)
    assert loop.step(setup.clock.now) is False


def test_s6_undecodable_bytes_are_a_dead_letter_and_the_next_record_is_processed() -> None:
    setup = Setup()
    first, last = group(2)
    setup.write(first, b"no record", last)
    setup.run(setup.loop(score))
    assert setup.scored() == ids([first, last])
    assert setup.committed() == 3
    (letter,) = setup.dead()
    assert (letter.topic, letter.partition, letter.offset, letter.kind) == (IN, 0, 1, "DecodeError")
    assert (letter.value, letter.key, letter.operator) == (b"no record", b"data/0/9", "reward")
    assert "not framed" in letter.error


def test_s6_the_dead_letter_and_the_offset_stand_in_one_transaction() -> None:
    setup = Setup()
    setup.write(b"no record")
    loop = setup.loop(score)
    setup.faults.plan = [("before_commit", Aborted("lost"))]
    loop.step(setup.clock.now)
    assert (setup.dead(), setup.committed()) == ([], None)
    setup.run(loop)
    assert (len(setup.dead()), setup.committed()) == (1, 1)


def test_b14_a_function_that_raises_is_tried_n_times_and_then_a_dead_letter_names_the_member() -> None:
    setup = Setup()
    poison, sound = group(2)
    setup.write(poison, sound)
    tries: list[str] = []

    def fragile(record: r.Record) -> list[r.Record]:
        assert isinstance(record, r.CompletedTrajectory)
        tries.append(record.trajectory_id)
        if record == poison:
            raise ValueError("cannot score this")
        return score(record)

    setup.run(setup.loop(fragile, max_attempts=3))
    assert tries.count(poison.trajectory_id) == 3
    assert setup.scored() == [sound.trajectory_id]
    (letter,) = setup.dead()
    assert (letter.kind, letter.error, letter.attempt) == ("ValueError", "cannot score this", 3)
    assert (letter.group_id, letter.trajectory_ids) == (poison.group_id, (poison.trajectory_id,))
    assert setup.committed() == 2


def test_b14_a_function_that_raises_once_loses_nothing() -> None:
    setup = Setup()
    records = group(3)
    setup.write(*records)
    failed: set[str] = set()

    def flaky(record: r.Record) -> list[r.Record]:
        assert isinstance(record, r.CompletedTrajectory)
        if record.trajectory_id not in failed:
            failed.add(record.trajectory_id)
            raise ConnectionError("again, please")
        return score(record)

    setup.run(setup.loop(flaky))
    assert setup.scored() == ids(records)
    assert setup.dead() == []


def test_an_output_that_breaks_its_rules_makes_its_input_a_dead_letter() -> None:
    setup = Setup()
    setup.write(*group(1))
    setup.run(setup.loop(lambda record: [replace(score(record)[0], reward=float("nan"))]))  # type: ignore[type-var]
    (letter,) = setup.dead()
    assert (letter.kind, setup.committed()) == ("EncodeError", 1)
    assert "reward: nan is not finite" in letter.error


def small_topic(name: str, limit: int) -> list[TopicSpec]:
    return [replace(spec, max_record_bytes=limit) if spec.name == name else spec for spec in topic_specs({IN: 1})]


def test_s8_an_output_above_the_limit_makes_its_input_a_dead_letter_and_loses_no_neighbour() -> None:
    setup = Setup(specs=small_topic(OUT, 1_000))
    before, after = group(2)
    huge = sample.completed(sample.prompt(7), text="x" * 2_000)
    setup.write(before, huge, after)
    setup.run(setup.loop(score))
    assert sorted(setup.scored()) == ids([before, after])
    (letter,) = setup.dead()
    assert (letter.kind, letter.offset, letter.trajectory_ids) == ("RecordTooLarge", 1, (huge.trajectory_id,))
    assert CODEC.decode(letter.value or b"") == huge
    assert setup.committed() == 3


def test_s8_a_dead_letter_above_the_limit_goes_without_the_bytes() -> None:
    setup = Setup(specs=small_topic("dead.letters", 1_000))
    setup.write(b"y" * 3_000)
    setup.run(setup.loop(score))
    (letter,) = setup.dead()
    assert letter.value is None
    assert f"3000 bytes are left out; read them at {IN}[0]@0" in letter.error
    assert setup.committed() == 1


@pytest.mark.parametrize("error", [Aborted("gone"), Evicted("not yours")])
def test_s9_after_an_abort_or_eviction_the_input_is_read_again_and_nothing_is_doubled(error: Retryable) -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    loop = setup.loop(score)
    setup.faults.plan = [("before_commit", error)] * 3
    setup.run(loop)
    assert setup.scored() == ids(records)
    assert (loop.counts.rewinds, setup.committed()) == (3, 4)


@pytest.mark.parametrize("error", [Aborted("no"), Evicted("no")])
def test_s9_a_partition_that_was_full_when_a_transaction_aborted_is_read_again(error: Retryable) -> None:
    setup = Setup(partitions=2)
    setup.write(*group(6), partition=0)
    worker = Manual()
    loop = setup.loop(worker, max_in_hand=2)  # one record a partition: it is paused while that is in hand
    setup.run(loop, 5)
    setup.faults.plan = [("before_commit", error)]
    worker.finish()
    for _ in range(20):
        setup.run(loop, 5)
        worker.finish()
    assert loop.counts.rewinds == 1
    assert sorted(setup.scored()) == ids(group(6))


def test_an_unknown_outcome_flies_and_the_next_process_doubles_nothing() -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    loop = setup.loop(score)
    setup.faults.plan = [("after_commit", Unavailable("no answer"))]
    with pytest.raises(Unavailable):
        setup.run(loop)
    loop.close()
    setup.run(setup.loop(score))
    assert setup.scored() == ids(records)


def test_s5_a_crash_between_produce_and_commit_is_invisible_and_the_successor_goes_on() -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    loop = setup.loop(score)
    setup.faults.plan = [("inside_commit", KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        setup.run(loop)
    assert setup.scored() == []
    setup.run(setup.loop(score))
    assert setup.scored() == ids(records)
    with pytest.raises(Fenced):
        loop.step(setup.clock.now)


def test_offsets_never_pass_a_record_that_is_not_done() -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    worker = Manual()
    loop = setup.loop(worker)
    loop.step(setup.clock.now)
    worker.finish(lambda record: record != records[1])
    setup.run(loop)
    assert setup.scored() == ids(records[:1])
    assert setup.committed() == 1
    worker.finish()
    setup.run(loop)
    assert setup.scored() == ids(records)


def test_a16_a_record_that_takes_for_ever_holds_only_its_own_partition() -> None:
    setup = Setup(partitions=2)
    slow = sample.completed(sample.prompt(99))
    setup.write(slow, *group(20), partition=0)
    others = [sample.completed(sample.prompt(index)) for index in range(100, 140)]
    setup.write(*others, partition=1)
    worker = Manual()
    loop = setup.loop(worker, max_in_hand=8)
    for _ in range(100):
        loop.step(setup.clock.now)
        worker.finish(lambda record: record != slow)
        setup.clock.now += 0.1
    assert sorted(setup.scored()) == ids(others)
    assert loop.in_hand <= 8
    assert loop._consumer.assignment() == {TopicPartition(IN, 0), TopicPartition(IN, 1)}


def test_s10_a_second_member_takes_over_finished_uncommitted_work_and_nothing_is_doubled() -> None:
    setup = Setup(partitions=2)
    left, right = group(10)[:5], group(10)[5:]
    setup.write(*left, partition=0)
    setup.write(*right, partition=1)
    worker = Manual()
    first = setup.loop(worker, linger_s=1e9)
    for _ in range(3):
        first.step(setup.clock.now)
    worker.finish(lambda record: record not in (left[-1], right[-1]))
    first.step(setup.clock.now)  # finished, in hand, not committed
    assert setup.scored() == []
    second = setup.loop(score, instance="reward-1")
    for _ in range(600):
        first.step(setup.clock.now)
        worker.finish()
        second.step(setup.clock.now)
        setup.clock.now += 0.1
    assert sorted(setup.scored()) == sorted(ids(left + right))
    assert len(first._consumer.assignment()) == len(second._consumer.assignment()) == 1
    assert worker.cancelled


def test_drain_takes_nothing_new_and_commits_what_is_in_hand() -> None:
    setup = Setup()
    records = group(6)
    setup.write(*records[:3])
    worker = Manual()
    loop = setup.loop(worker)
    setup.run(loop, 3)
    setup.write(*records[3:])
    assert loop.drain(setup.clock.now) is False
    worker.finish()
    assert loop.drain(setup.clock.now) is True
    assert setup.scored() == ids(records[:3])
    loop.close()
    setup.run(setup.loop(score))
    assert setup.scored() == ids(records)


def test_a_transaction_is_bounded_in_bytes() -> None:
    setup = Setup()
    records = group(6)
    setup.write(*records)
    loop = setup.loop(score, max_transaction_bytes=1)
    setup.run(loop)
    assert setup.scored() == ids(records)
    assert loop.counts.transactions == 6
