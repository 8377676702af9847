from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, DeadlineExceeded, OffsetOutOfRange, Retryable, Unavailable
from laminar.streams.log import TopicPartition, TopicSpec
from laminar.streams.memory import Point
from laminar.streams.topics import topic_specs
from laminar.streams.worker import Result
from tests.support import sample
from tests.support.loop_bench import CODEC, IN, AwayLog, Manual, Setup, Slow, group, ids, score


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


def test_a_registry_that_does_not_answer_loses_nothing_of_what_was_polled_with_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    records = group(4)
    setup.write(*records)
    loop = setup.loop(score)
    answers = iter([True, False, False])
    decode = CODEC.decode

    def sometimes(data: bytes) -> r.Record:
        if not next(answers, True):
            raise Unavailable("schema registry: no answer")
        return decode(data)

    monkeypatch.setattr(CODEC, "decode", sometimes)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no answer"):
            loop.step(setup.clock.now)
    setup.run(loop)
    monkeypatch.undo()
    assert setup.scored() == ids(records)
    assert (setup.committed(), loop.in_hand) == (4, 0)
