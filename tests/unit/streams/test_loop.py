from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Aborted, DeadlineExceeded, Evicted, Fenced, OffsetOutOfRange, Retryable, Unavailable
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


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("error", [Unavailable("no answer"), DeadlineExceeded("commits: not within 15 s")])
def test_an_unknown_outcome_is_settled_and_finished_work_is_never_done_again(point: Point, error: Retryable) -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    worker = Manual()
    loop = setup.loop(worker)
    loop.step(setup.clock.now)
    worker.finish()
    setup.faults.plan = [(point, error)]
    setup.run(loop, 100)
    assert setup.scored() == ids(records)
    assert worker.called == 4
    assert (loop.counts.rewinds, loop.counts.records, loop.in_hand, setup.committed()) == (1, 4, 0, 4)


def test_while_an_outcome_is_unknown_nothing_is_polled_and_no_transaction_is_opened() -> None:
    setup = Setup()
    setup.write(*group(2))
    loop = setup.loop(score)
    setup.faults.plan = [("after_commit", Unavailable("no answer"))]
    loop.step(setup.clock.now)
    setup.write(*group(4)[2:])
    setup.faults.plan = [("before_commit", AssertionError("a transaction is opened"))]
    for _ in range(10):  # less than the pause before the outcome is asked for
        loop.step(setup.clock.now)
    assert loop.in_hand == 2
    assert loop.drain(setup.clock.now) is False
    setup.faults.plan = []
    setup.clock.now += 1.0
    setup.run(loop)
    assert setup.scored() == ids(group(4))


def test_s21_an_outage_that_outlasts_the_limit_is_raised_with_its_reason() -> None:
    setup = Setup()
    setup.write(*group(2))
    away = AwayLog(setup)
    loop = setup.loop(score, log=away, outage_s=60.0)
    setup.faults.plan = [("before_commit", Unavailable("no answer to the commit"))]
    loop.step(setup.clock.now)
    away.reason = "Kafka broker 127.0.0.1:9092: no answer"
    for _ in range(58):
        setup.clock.now += 1.0
        loop.step(setup.clock.now)
    setup.clock.now += 2.0
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9092: no answer"):
        loop.step(setup.clock.now)


def test_transactions_that_fail_for_longer_than_the_limit_are_raised_although_each_is_settled() -> None:
    setup = Setup()
    setup.write(*group(2))
    loop = setup.loop(score, outage_s=60.0)
    setup.faults.plan = [("before_commit", Aborted("no"))] * 500

    def go_on() -> None:
        for _ in range(200):
            loop.step(setup.clock.now)
            setup.clock.now += 0.5

    with pytest.raises(Aborted):
        go_on()
    assert setup.clock.now > 1_060.0


def test_s15_a_transaction_that_was_not_in_time_makes_the_next_ones_smaller_until_they_are_quick_again() -> None:
    setup = Setup()
    records = group(40)
    setup.write(*records)
    loop = setup.loop(score, max_in_hand=40)
    setup.faults.plan = [("before_commit", DeadlineExceeded("room in the send queue: not within 15 s"))] * 3
    sizes: list[int] = []
    before = 0
    for _ in range(100):
        loop.step(setup.clock.now)
        setup.clock.now += 1.0
        if loop.counts.records > before:
            sizes.append(loop.counts.records - before)
            before = loop.counts.records
    assert setup.scored() == ids(records)
    assert sizes[0] <= 5
    assert max(sizes) > sizes[0]


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


def test_s10_a_second_member_takes_over_and_what_was_finished_is_not_done_again() -> None:
    setup = Setup(partitions=2)
    left, right = group(10)[:5], group(10)[5:]
    setup.write(*left, partition=0)
    setup.write(*right, partition=1)
    worker = Manual()
    first = setup.loop(worker, linger_s=1e9, revoke_s=0.0)
    for _ in range(3):
        first.step(setup.clock.now)
    worker.finish(lambda record: record not in (left[-1], right[-1]))
    first.step(setup.clock.now)  # finished, in hand, not committed
    assert setup.scored() == []
    others = Manual()
    second = setup.loop(others, instance="reward-1")
    for _ in range(600):
        first.step(setup.clock.now)
        others.finish()
        second.step(setup.clock.now)
        setup.clock.now += 0.1
    (moved,) = second._consumer.assignment()
    assert (worker.cancelled, others.called) == ([worker.tickets[(left, right)[moved.partition][-1].trajectory_id]], 1)
    worker.finish()
    for _ in range(600):
        first.step(setup.clock.now)
        second.step(setup.clock.now)
        setup.clock.now += 0.1
    assert sorted(setup.scored()) == sorted(ids(left + right))
    assert len(first._consumer.assignment()) == 1


def test_s1_a_revocation_waits_for_work_that_ends_within_its_deadline() -> None:
    setup = Setup(partitions=2)
    setup.write(*group(2)[:1], partition=0)
    setup.write(*group(2)[1:], partition=1)
    worker = Slow(calls=20)
    first = setup.loop(worker, revoke_s=30.0)
    first.step(setup.clock.now)
    first.step(setup.clock.now)
    second = setup.loop(score, instance="reward-1")
    second.step(setup.clock.now)
    worker.left = 20  # ends while the revocation asks for it
    first.step(setup.clock.now)
    assert worker.left <= 0
    assert len(setup.scored()) == 2
    second.step(setup.clock.now)
    assert second.in_hand == 0


def test_s9_partitions_that_are_lost_already_are_dropped_without_waiting() -> None:
    setup = Setup()
    setup.write(*group(2))
    worker = Manual()
    first = setup.loop(worker, revoke_s=30.0)
    first.step(setup.clock.now)

    def asked() -> list[Result]:
        raise AssertionError("waits for work that cannot be committed")

    worker.collect = asked  # type: ignore[method-assign]
    first._consumer._cursor.drop(first._consumer.assignment())  # type: ignore[attr-defined]
    first._revoked(frozenset({TopicPartition(IN, 0)}))
    assert (first.in_hand, len(worker.cancelled)) == (0, 2)


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


def retained(setup: Setup, n: int) -> list[r.CompletedTrajectory]:
    """A group that has committed offset 2 of a partition of which retention then leaves only the end."""
    records = group(n)
    setup.write(*records[:2])
    first = setup.loop(score)
    setup.run(first)
    first.close()
    setup.write(*records[2:])
    setup.log.maintain(setup.clock.now)
    return records


def shrinking(keep_bytes: int) -> list[TopicSpec]:
    return [replace(spec, retention_bytes=keep_bytes) if spec.name == IN else spec for spec in topic_specs({IN: 1})]


def test_retention_that_passes_the_position_stops_the_loop_with_both_offsets() -> None:
    setup = Setup(specs=shrinking(1_000))
    retained(setup, 20)
    start = setup.log.reader().bounds(TopicPartition(IN, 0)).start
    loop = setup.loop(score, instance="reward-1")
    with pytest.raises(OffsetOutOfRange, match=rf"{IN}\[0\].* 2 .*{start}"):
        setup.run(loop)
    assert setup.committed() == 2


def test_retention_that_passes_the_position_is_jumped_and_told_in_the_transaction_that_commits_it() -> None:
    setup = Setup(specs=shrinking(1_000))
    records = retained(setup, 20)
    start = setup.log.reader().bounds(TopicPartition(IN, 0)).start
    assert 3 < start < 20
    loop = setup.loop(score, instance="reward-1", on_lost_offsets="jump")
    setup.faults.plan = [("before_commit", Aborted("no"))]
    setup.run(loop)
    (told,) = [x for x in setup.read("dead.letters") if isinstance(x, r.OffsetsSkipped)]
    assert (told.operator, told.group, told.topic, told.partition) == ("reward", "run.reward", IN, 0)
    assert (told.from_offset, told.to_offset) == (2, start)
    assert sorted(setup.scored()) == sorted(ids(records[:2] + records[start:]))
    assert (setup.committed(), loop.counts.skipped, loop.counts.records) == (20, start - 2, 20 - start)


def test_f10_what_is_in_hand_is_bounded_in_bytes_and_every_partition_has_its_share() -> None:
    setup = Setup(partitions=2)
    for partition in range(2):
        for index in range(10):
            record = sample.completed(sample.prompt(10 * partition + index), text="x" * 10_000)
            setup.write(record, partition=partition)
    worker = Manual()
    loop = setup.loop(worker, max_in_hand=20, max_in_hand_bytes=80_000)
    setup.run(loop, 10)
    held = loop.in_hand
    assert 2 <= held < 20
    assert {loop._hand.holds(TopicPartition(IN, p), 1, 10**9) for p in range(2)} == {True}
    assert loop._hand.bytes < 80_000 + 2 * 10 * 12_000
    for _ in range(40):
        worker.finish()
        setup.run(loop, 3)
    assert len(setup.scored()) == 20
    assert (loop._hand.bytes, loop.in_hand) == (0, 0)
