from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, Evicted, Fenced, Retryable
from laminar.streams.log import TopicPartition, TopicSpec
from laminar.streams.topics import topic_specs
from tests.support import sample
from tests.support.loop_bench import CODEC, IN, OUT, Manual, Setup, group, ids, score


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
