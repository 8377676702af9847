"""The ledger depends on what stands on each partition, not on how and when the partitions were read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.schemas import records as r
from laminar.streams.audit import Auditor, audit
from laminar.streams.audit.fold import Fold
from laminar.streams.audit.report import Reached, report
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Bounds, LogRecord, Reader, TopicPartition
from laminar.streams.memory import MemoryLog
from tests.support.recorded import CachingPeek, Recording, RunOfAll, recorded

PEEK = CachingPeek()
NOWHERE = Reached(ends={}, committed={}, trainer={})


def shuffled(records: tuple[LogRecord, ...], rng: random.Random) -> Iterator[LogRecord]:
    """Another interleaving of the partitions: now and then a long stretch of one of them."""
    queues: dict[TopicPartition, list[LogRecord]] = {}
    for record in sorted(records, key=lambda one: one.offset, reverse=True):
        queues.setdefault(record.source, []).append(record)
    while queues:
        source = rng.choice(sorted(queues))
        for _ in range(rng.choice([1, 1, 3, 50])):
            if queues[source]:
                yield queues[source].pop()
        if not queues[source]:
            del queues[source]


def settled_ledger(fold: Fold, records: tuple[LogRecord, ...], reached: Reached, *, window: int) -> Ledger:
    """With what was put away too early looked up, as an Auditor does."""
    if fold.reopened or fold.steps.gap is not None:
        again = Fold(PEEK, "run", only=fold.reopened, window=window, keep_above=fold.steps.gap)
        for record in records:
            again.apply(record)
        fold.restore(again, steps=fold.steps.gap is not None)
    return report(fold, reached)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.sampled_from([1, 2, 16]), mutation=st.integers(0, 10**6))
def test_any_interleaving_of_the_partitions_gives_the_same_ledger(seed: int, window: int, mutation: int) -> None:
    run: Recording = recorded()
    rng = random.Random(seed)
    records = run.records
    if mutation % 2:  # a broken history, too
        at = mutation % len(records)
        records = records[:at] + records[at + 1 :]
    fold = Fold(PEEK, "run", window=window)
    taken: list[LogRecord] = []
    for record in shuffled(records, rng):
        fold.apply(record)
        taken.append(record)
        if rng.random() < 0.01:
            ledger = settled_ledger(fold, tuple(taken), NOWHERE, window=window)
            if records is run.records:
                assert ledger.violations == ()
    last = settled_ledger(fold, records, run.reached(records), window=window)
    assert last == run.ledger(records)


class Restless:
    """A log on which things go on happening while it is read."""

    def __init__(self, run: RunOfAll, rng: random.Random) -> None:
        assert isinstance(run.world.log, MemoryLog)
        self._run = run
        self._rng = rng
        self._log = run.world.log
        self.topics = self._log.topics

    def meanwhile(self) -> None:
        while self._rng.random() < 0.3:
            self._run.turn()

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        self.meanwhile()
        return self._log.committed(group, topic)

    def reader(self) -> Reader:
        return RestlessReader(self, self._log.reader())


class RestlessReader:
    """A reader of such a log."""

    def __init__(self, log: Restless, reader: Reader) -> None:
        self._log = log
        self._reader = reader
        self.assign, self.position, self.seek = reader.assign, reader.position, reader.seek
        self.offset_at, self.close = reader.offset_at, reader.close

    def bounds(self, partition: TopicPartition) -> Bounds:
        if partition.partition == 0:
            self._log.meanwhile()
        return self._reader.bounds(partition)

    def poll(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        self._log.meanwhile()
        return self._reader.poll(min(max_records, 20), timeout_s)


@pytest.mark.parametrize("seed", range(3))
def test_following_a_live_run_finds_nothing_wrong_and_ends_with_the_ledger_of_one_pass(
    seed: int, tmp_path: Path
) -> None:
    run, rng = RunOfAll(tmp_path), random.Random(seed)
    run.faults.rng, run.faults.rate = random.Random(seed), 0.05
    log = Restless(run, rng)
    auditor = Auditor(log, run.world.codec, "run", max_staleness=2, window=2)  # type: ignore[arg-type]
    looks = 0
    while not run.world.read("training.steps", r.RunEnded):
        assert looks < 600, "the run does not end"
        for _ in range(rng.randrange(20)):
            run.turn()
        ledger = auditor.look(Deadline.after(60, "look"))
        assert ledger.violations == ()
        looks += 1
        if looks > 200:
            run.faults.rate = 0.0
    for _ in range(50):
        run.turn()
    last = auditor.look(Deadline.after(60, "look"))
    assert looks > 5
    assert last == audit(run.world.log, run.world.codec, "run", max_staleness=2)
    assert last.ended is not None
    assert len(auditor.fold.settled) > 0
    auditor.close()
