"""Decisions about dead letters, each taken once, whoever is killed or does the same at the same time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, ConfigError, DeadlineExceeded, Fenced, Unavailable
from laminar.streams.dead import Desk, Gone, Outcome
from laminar.streams.dead_letter import RETRY_OF, RETRY_SOURCE, dead_letter
from laminar.streams.deadline import Deadline
from laminar.streams.log import LogRecord, OutRecord
from laminar.streams.memory import MemoryLog, Point
from laminar.streams.memory.faults import NoFaults
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from tests.support import sample
from tests.support.dataflow import World
from tests.support.faults import Crash

COMPLETED = "trajectories.completed"


class Planned(NoFaults):
    """Faults of the next transactions of the desk, in order."""

    def __init__(self, *plan: tuple[Point, BaseException]) -> None:
        self.plan = list(plan)

    def at(self, point: Point, transactional_id: str) -> None:
        if transactional_id == "run.dead-letters" and self.plan and self.plan[0][0] == point:
            raise self.plan.pop(0)[1]


def desk(world: World, faults: Planned | None = None, by: str = "ada@lab", timeout_s: float = 5.0) -> Desk:
    assert isinstance(world.log, MemoryLog)
    log = world.log
    if faults is not None:
        log = MemoryLog(clock=lambda: world.now, broker=world.log.broker, faults=faults)  # type: ignore[arg-type]
    return Desk(
        log, world.codec, "run", by=by, deadline=Deadline.after(timeout_s, "desk"), clock=lambda: world.now
    )  # fmt: skip


def completed_and_letter(world: World, member: int = 0) -> OutRecord:
    """A record that was refused, on its topic, and its letter."""
    made = sample.completed(sample.prompt(0, group_size=4), member=member)
    original = replace(outgoing(world.codec, made, partition=5), headers=(("trace", b"\x00\xff"),))
    with world._producer.transaction() as tx:
        tx.send(original)
    (*_, source) = read_topic(world.log, COMPLETED, Deadline.after(5, "read"))
    letter = dead_letter(source, ValueError("no"), operator="reward", attempt=3, at_ms=world.now_ms, record=made)
    world.write(letter)
    return original


def standing(world: World, topic: str = COMPLETED) -> list[LogRecord]:
    return list(read_topic(world.log, topic, Deadline.after(5, "read")))


def retry_all(world: World, faults: Planned | None = None, **options: object) -> list[Outcome]:
    with closing(desk(world, faults, **options)) as one:  # type: ignore[arg-type]
        return [one.retry(entry) for entry in list(one.register.entries.values())]


def markers(world: World) -> list[r.DeadLetterSettled]:
    return world.read("dead.letters", r.DeadLetterSettled)


def test_a_retry_puts_the_original_on_its_partition_with_two_headers_more() -> None:
    world = World()
    original = completed_and_letter(world)
    (outcome,) = retry_all(world)
    assert outcome.text == f"0@0 retried: it stands on {COMPLETED}[5] again"
    first, again = standing(world)
    assert (again.partition, again.key, again.value) == (5, original.key, original.value)
    assert again.headers == (
        ("trace", b"\x00\xff"),
        (RETRY_OF, b"dead.letters[0]@0"),
        (RETRY_SOURCE, first.where.encode()),
    )
    (marker,) = markers(world)
    assert (marker.letter_partition, marker.letter_offset, marker.action) == (0, 0, "retry")
    assert (marker.trajectory_ids, marker.by) == (("data/0/0/0",), "ada@lab")


def test_the_second_retry_says_when_and_by_whom_the_first_was() -> None:
    world = World(now=86_400.0 * 365)
    completed_and_letter(world)
    retry_all(world)
    (outcome,) = retry_all(world, by="bob@lab")
    assert outcome.text == "0@0 was retried at 1971-01-01 00:00:00 UTC by ada@lab: nothing done"
    assert (outcome.done, outcome.as_wanted) == (False, True)
    assert len(standing(world)) == 2
    assert len(markers(world)) == 1


def test_a_dropped_letter_cannot_be_retried_nor_the_other_way_round() -> None:
    world = World()
    completed_and_letter(world, 0)
    completed_and_letter(world, 1)
    with closing(desk(world)) as one:
        first, second = one.register.entries.values()
        one.drop(first)
        one.retry(second)
        assert not one.retry(first).as_wanted
        assert not one.drop(second).as_wanted
    assert len(standing(world)) == 3
    assert [m.action for m in markers(world)] == ["drop", "retry"]


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("before_commit", Crash()),
        ("before_commit", Aborted("gone")),
        ("inside_commit", Crash()),
        ("after_commit", Crash()),
        ("after_commit", Unavailable("no answer")),
    ],
)
def test_a_retry_that_is_killed_or_unanswered_at_any_point_happens_once(point: Point, error: BaseException) -> None:
    world = World()
    completed_and_letter(world)
    faults = Planned((point, error))
    if isinstance(error, Crash):
        with pytest.raises(Crash):
            retry_all(world, faults)
        world.advance(100)
        (outcome,) = retry_all(world)
        assert outcome.done == (point != "after_commit")
    else:
        (outcome,) = retry_all(world, faults)
        assert outcome.done
    assert not faults.plan
    assert len(standing(world)) == 2
    assert len(markers(world)) == 1


def test_of_two_people_who_retry_at_the_same_time_one_is_told_to_stop() -> None:
    world = World()
    completed_and_letter(world)
    with closing(desk(world)) as ada:
        (entry,) = ada.register.entries.values()
        (outcome,) = retry_all(world, by="bob@lab")
        assert outcome.done
        with pytest.raises(Fenced):
            ada.retry(entry)
    assert len(standing(world)) == 2


class HangsOnce(NoFaults):
    """The first transaction is left open, as by a process that was stopped inside its commit."""

    def at(self, point: Point, transactional_id: str) -> None:
        del transactional_id
        if point == "inside_commit":
            raise Crash


def test_a_decision_that_somebody_elses_open_transaction_hides_is_waited_for() -> None:
    world = World()
    completed_and_letter(world)
    assert isinstance(world.log, MemoryLog)
    stopped = MemoryLog(clock=lambda: world.now, broker=world.log.broker, faults=HangsOnce())
    with pytest.raises(Crash), stopped.producer("reward-0").transaction() as tx:
        tx.send(outgoing(world.codec, gone("my.topic")))
    (outcome,) = retry_all(world)
    assert outcome.done
    with pytest.raises(DeadlineExceeded, match=r"dead.letters\[0\]@1 is not visible yet"):
        retry_all(world, by="bob@lab", timeout_s=0.5)
    assert len(standing(world)) == 2
    world.log.producer("reward-0")  # its successor settles what it left open
    (outcome,) = retry_all(world, by="bob@lab")
    assert not outcome.done
    assert len(standing(world)) == 2


def test_bytes_that_the_letter_left_out_are_read_from_the_topic() -> None:
    world = World()
    value = b"v" * 20_000_000
    with world._producer.transaction() as tx:
        tx.send(OutRecord(topic=COMPLETED, key=b"d/0/0", value=value, partition=2))
    (source,) = standing(world)
    world.write(dead_letter(source, ValueError("no"), operator="reward", attempt=1, at_ms=0))
    assert world.read("dead.letters", r.DeadLetter)[0].value is None
    retry_all(world)
    assert [len(x.value or b"") for x in standing(world)] == [20_000_000] * 2


def gone(topic: str, **changes: object) -> r.DeadLetter:
    values = {
        "operator": "x", "kind": "ValueError", "error": "no", "topic": topic, "partition": 0, "offset": 7,
        "attempt": 1, "key": b"k", "value": b"v", "at_ms": 0,
    }  # fmt: skip
    return r.DeadLetter(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("letter", "text"),
    [
        (gone(COMPLETED, value=None), "the record is not there any more (retention)"),
        (gone(COMPLETED, value=None, partition=70), "does not exist any more"),
        (gone("rollouts.commands"), "a command is for one process at one moment"),
        (gone("rollouts.status"), "what it said was true at that moment only"),
        (gone("dead.letters"), "there are no letters about letters"),
        (gone("trajectories.partial"), "an event that comes again later would be out of order"),
        (gone("my.topic"), "the topic does not exist any more"),
        (
            gone("trajectories.partial", offset=-1, partition=-1, value=None, trajectory_ids=("d/0/0/1",)),
            "so it cannot begin anew",
        ),
    ],
)
def test_what_cannot_be_retried_says_why(letter: r.DeadLetter, text: str) -> None:
    world = World()
    world.write(letter)
    with closing(desk(world)) as one:
        (entry,) = one.register.entries.values()
        with pytest.raises(Gone) as raised:
            one.retry(entry)
    assert text in str(raised.value)
    assert str(raised.value).startswith("0@0: ")
    assert markers(world) == []


def test_a_member_that_has_another_fate_already_is_not_retried() -> None:
    world = World()
    completed_and_letter(world)
    world.write(sample.trainer_started(), sample.training_step(trained=("data/0/0/0",)))
    with closing(desk(world)) as one:
        (entry,) = one.register.entries.values()
        with pytest.raises(Gone, match=r"data/0/0/0 has another fate already: trained at training.steps\[0\]@1"):
            one.retry(entry)
    world.write(sample.trainer_started(epoch=9, step=0))  # voids the step
    assert [outcome.done for outcome in retry_all(world)] == [True]


@pytest.mark.parametrize("ended_attempt", [0, 4])
def test_a_member_that_a_rollout_gave_up_begins_anew_with_the_next_attempt(ended_attempt: int) -> None:
    world = World()
    prompt = sample.prompt(0, group_size=4, min_version=2)
    moved = r.TrajectoryMoved(
        trajectory_id="data/0/0/1", attempt=ended_attempt, reason="dead", from_rollout="rollout-0",
        to_rollout="rollout-3", to_incarnation=8, n_tokens=0, at_ms=0,
    )  # fmt: skip
    world.write(sample.started(prompt, 1), sample.started(prompt, 2), *([moved] if ended_attempt else []))
    letter = gone("trajectories.partial", offset=-1, partition=-1, value=None, key=b"data/0/0/1")
    world.write(
        sample.ended("data/0/0/1", finish=None, error="no", attempt=ended_attempt),
        replace(letter, trajectory_ids=("data/0/0/1",)),
    )
    retry_all(world)
    *_, again = [s for s in world.read("trajectories.partial", r.TrajectoryStarted) if s.member == 1]
    assert (again.attempt, again.incarnation, again.prompt, again.member) == (ended_attempt + 1, 0, prompt, 1)
    assert again.rollout_id == ("rollout-3" if ended_attempt else "rollout-0")
    assert again.seed == 7


def test_where_the_lifecycle_is_gone_the_prompt_is_taken_from_prompts() -> None:
    world = World()
    world.write(sample.prompt(0, group_size=4))
    letter = gone("trajectories.partial", offset=-1, partition=-1, value=None, trajectory_ids=("data/0/0/1",))
    world.write(letter)
    retry_all(world)
    (again,) = world.read("trajectories.partial", r.TrajectoryStarted)
    assert again.attempt == 1000


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("first", "first: not the place of a dead letter (valid: 0@17, as `laminar dead list` shows it)"),
        ("0@5", "0@5: no dead letter stands there (letters near it: 0@0)"),
        ("1@0", "1@0: no dead letter stands there (letters near it: 0@0)"),
    ],
)
def test_a_wrong_place_says_what_would_be_valid(place: str, text: str) -> None:
    world = World()
    completed_and_letter(world)
    with closing(desk(world)) as one, pytest.raises(ConfigError) as raised:
        one.register.find(place)
    assert str(raised.value) == text


@pytest.mark.parametrize("place", ["0@0", "0", "dead.letters[0]@0"])
def test_a_place_may_be_written_in_three_ways(place: str) -> None:
    world = World()
    completed_and_letter(world)
    with closing(desk(world)) as one:
        assert one.register.find(place).place == "0@0"
