"""What an audit keeps: members in flight, the steps that may be taken back, a byte for each of the others."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.audit import Auditor
from laminar.streams.audit.fold import Fold
from laminar.streams.audit.peek import Peek
from laminar.streams.audit.settled import Fate, Settled
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import LogRecord, OutRecord
from laminar.streams.memory import MemoryLog
from laminar.streams.topics import TOPICS, outgoing, topic_specs
from tests.support import sample
from tests.support.synthetic import as_read, synthetic_run

CODEC = Codec()
STEPS, PER_STEP = 12, 8
"""Of the run below: 2 groups of 4 a step."""


class Followed:
    """A run on a memory log, of which an auditor with a window of two steps has read everything so far."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.log.create_topics(topic_specs(dict.fromkeys(TOPICS, 1)))
        self.producer = self.log.producer("test")
        for transaction in synthetic_run(CODEC, steps=STEPS, groups_per_step=2, group_size=4, moved_every=5):
            self.commit(transaction)
        self.auditor = Auditor(self.log, CODEC, "run", window=2)
        self.look()

    def commit(self, records: list[OutRecord]) -> None:
        with self.producer.transaction() as tx:
            for record in records:
                tx.send(record)

    def write(self, *records: r.Record) -> None:
        self.commit([outgoing(CODEC, record) for record in records])

    def look(self, **options: Any) -> Ledger:
        return self.auditor.look(Deadline.after(60, "look"), **options)


@pytest.fixture
def followed() -> Iterator[Followed]:
    made = Followed()
    yield made
    made.auditor.close()


def test_members_with_a_fate_are_put_away_but_for_those_of_the_newest_steps(followed: Followed) -> None:
    ledger = followed.look()
    assert (ledger.violations, ledger.trained, ledger.in_flight) == ((), 10 * PER_STEP, {"scored": 2 * PER_STEP})
    assert len(followed.auditor.fold.settled) == 8 * PER_STEP
    assert len(followed.auditor.fold.members) == 4 * PER_STEP  # two steps to be trained, two that may be taken back
    assert followed.auditor.read_again == 0


def test_b1_a_second_fate_of_a_member_that_was_put_away_is_found_with_all_its_records(followed: Followed) -> None:
    followed.write(sample.training_step(11, epoch=0, trained=["data/0/0/1"], staleness={"1": 1}))
    (violation,) = followed.look(thorough=False).violations  # at once: a second fate cannot wait
    assert (violation.kind, violation.trajectory_id) == ("trained_twice", "data/0/0/1")
    assert violation.places == ("training.steps[0]@11", "training.steps[0]@1")
    assert followed.auditor.read_again == 1


def test_b12_a_late_result_of_a_member_that_was_put_away_is_looked_up_and_put_away_again(followed: Followed) -> None:
    settled = len(followed.auditor.fold.settled)
    name, of = "data/0/1/0", sample.prompt(1, group_size=4)  # the fifth of the run, which has moved
    late = sample.completed(of, 0, response=sample.tokens(64))
    followed.write(late, sample.ended(name, n_tokens=64), sample.scored(late))
    ledger = followed.look()
    assert (ledger.violations, ledger.late, ledger.trained) == ((), 1, 10 * PER_STEP)
    assert (followed.auditor.read_again, len(followed.auditor.fold.settled)) == (1, settled)
    assert ledger == Auditor(followed.log, CODEC, "run").look(Deadline.after(60, "look"))


def test_tokens_of_a_zombie_are_ignored_without_a_second_reading(followed: Followed) -> None:
    followed.write(
        r.TrajectoryTokens(trajectory_id="data/0/1/0", attempt=0, start=32, tokens=sample.tokens(2), at_ms=1)
    )
    assert followed.look().violations == ()
    assert followed.auditor.read_again == 0


@pytest.mark.parametrize("step", [9, 8, 3, 0])
def test_a_trainer_that_resumes_from_any_step_takes_back_all_fates_above_it(followed: Followed, step: int) -> None:
    followed.write(sample.trainer_started(epoch=1, step=step, version=11))
    ledger = followed.look()
    assert (ledger.violations, ledger.trained) == ((), step * PER_STEP)
    assert (ledger.in_flight, ledger.steps) == ({"scored": (STEPS - step) * PER_STEP}, step)
    assert (ledger.void_steps, ledger.staleness) == (10 - step, {1: step * PER_STEP} if step else {})
    assert followed.auditor.read_again == (step < 8)  # the window is two steps
    everything = [f"data/0/{group}/{m}" for group in (2 * step, 2 * step + 1) for m in range(4)]
    followed.write(sample.training_step(step + 1, epoch=1, version=12, trained=everything, staleness={"5": 8}))
    ledger = followed.look()
    assert (ledger.violations, ledger.trained) == ((), (step + 1) * PER_STEP)
    assert ledger == Auditor(followed.log, CODEC, "run").look(Deadline.after(60, "look"))


def test_the_memory_of_an_audit_does_not_follow_the_length_of_the_run() -> None:
    records = as_read(synthetic_run(CODEC, steps=50, groups_per_step=4, group_size=4, n_tokens=8))
    fold = Fold(Peek(CODEC), "run", window=4)
    sizes: list[int] = []
    tracemalloc.start()
    try:
        for record in records:
            fold.apply(record)
            if record.topic == "training.steps" and record.offset in (15, 45):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    early, late = sizes
    assert len(fold.settled) == 16 * 44
    assert late - early < 480 * 64  # bytes: 480 members more, which as objects would be over 1 KB each
    assert len(fold.members) == 16 * (4 + 2)


def test_partitions_are_read_at_the_same_pace_so_that_members_close_as_the_run_goes_on() -> None:
    now = itertools.count(1_000_000)
    log = MemoryLog(clock=lambda: float(next(now)))
    log.create_topics(topic_specs(dict.fromkeys(TOPICS, 1) | {"prompts": 4, "trajectories.completed": 3}))
    with closing(log.producer("test")) as producer:
        for transaction in synthetic_run(CODEC, steps=60, groups_per_step=4, group_size=4, n_tokens=4):
            with producer.transaction() as tx:
                for record in transaction:
                    tx.send(record)
    with closing(Auditor(log, CODEC, "run", window=2)) as auditor:
        apply, most = auditor.fold.apply, 0

        def watched(record: LogRecord) -> None:
            nonlocal most
            apply(record)
            most = max(most, len(auditor.fold.members))

        auditor.fold.apply = watched  # type: ignore[method-assign]
        ledger = auditor.look(Deadline.after(60, "look"))
    assert (ledger.violations, ledger.admitted) == ((), 60 * 16)
    assert most <= 6 * 16  # two steps to be trained, two that may be taken back, and what is just arriving


def test_settled_members_take_a_byte_each() -> None:
    settled = Settled()
    tracemalloc.start()
    try:
        for index, member in itertools.product(range(2048), range(16)):
            fate = "trained" if (index * 7 + member) % 10 else "zero_advantage"
            settled.add(f"d/0/{index}/{member}", fate, member % 3, 16)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(settled) == 32_768
    assert size < 37_000
    assert settled.get("d/0/2047/15") == Fate("trained", 0)
    assert settled.get("d/0/2048/0") is None


def test_members_with_the_same_fate_take_next_to_nothing() -> None:
    settled = Settled()
    tracemalloc.start()
    try:
        for index in range(4096):
            for member in range(8):
                settled.add(f"d/0/{index}/{member}", "trained", 0, 8)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 8_000
    settled.remove("d/0/5/5")
    assert settled.get("d/0/5/5") is None
    assert settled.get("d/0/5/6") == Fate("trained", 0)
    settled.add("d/0/5/5", "stale", 2)
    assert settled.get("d/0/5/5") == Fate("stale", 2)


@pytest.mark.parametrize("odd", ["x", "d/0/007/1", "d/0/1/16", "d/0/-1/1", "d/0/1/²", ""])
def test_ids_of_another_form_are_kept_one_by_one(odd: str) -> None:
    settled = Settled()
    settled.add("d/0/1/0", "trained", 0, 4)
    settled.add(odd, "stale", 40)
    assert (settled.get(odd), len(settled)) == (Fate("stale", 15), 2)
    settled.remove(odd)
    assert settled.get(odd) is None
    assert settled.get("d/0/1/0") == Fate("trained", 0)
