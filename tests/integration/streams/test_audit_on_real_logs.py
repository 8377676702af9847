"""The audit on logs with a disk or a broker behind them: control markers between the records, a compacted topic."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.audit import Auditor
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log, LogRecord, Membership, OutRecord, Producer, TopicPartition
from laminar.streams.namespace import NamespacedLog
from laminar.streams.reading import partitions_of, read_topic
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support import sample
from tests.support.synthetic import synthetic_run
from tests.support.weights import NoWeights

CODEC = Codec()
TWO_DAYS_MS = 48 * 3600 * 1000
SIZES = {"prompts": 2, "trajectories.partial": 3, "trajectories.completed": 2, "trajectories.scored": 3}


@dataclass
class Place:
    """A log of its own, and how its maintenance is made to run."""

    log: Log
    maintain: Callable[[], None]
    group: str

    @cached_property
    def producer(self) -> Producer:
        return self.log.producer(self.group)

    def commit(self, records: list[OutRecord]) -> None:
        with self.producer.transaction() as tx:
            for record in records:
                tx.send(record)

    def write(self, *records: r.Record, at_ms: int | None = None) -> None:
        self.commit([replace(outgoing(CODEC, record), timestamp_ms=at_ms) for record in records])

    def ends(self, topic: str) -> dict[TopicPartition, int]:
        with closing(self.log.reader()) as reader:
            return {p: reader.bounds(p).end for p in partitions_of(self.log, topic)}

    def pass_everything(self, consumer: str, topic: str) -> None:
        """What a consumer's last transaction commits."""
        with self.producer.transaction() as tx:
            tx.commit_offsets(Membership(f"{self.group}.{consumer}"), self.ends(topic))

    def auditor(self) -> Auditor:
        return Auditor(
            self.log,
            CODEC,
            "run",
            rollout_group=f"{self.group}.rollout",
            reward_group=f"{self.group}.reward",
            trainer_group=f"{self.group}.trainer",
            window=2,
        )

    def audit(self) -> Ledger:
        with closing(self.auditor()) as auditor:
            return auditor.look(Deadline.after(120, "audit"))


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    tag = f"audit-{uuid.uuid4().hex[:8]}"
    specs = [replace(s, compaction_lag_ms=0) if s.name == "weights.versions" else s for s in topic_specs(SIZES)]
    if request.param == "sqlite":
        embedded = SqliteLog(tmp_path / "log")
        made = Place(embedded, lambda: embedded.maintain(time.time()), tag)
    else:
        shared = request.getfixturevalue("kafka_handles").open()
        made = Place(NamespacedLog(shared, f"{tag}."), lambda: time.sleep(0.2), tag)
    with closing(made.log):
        made.log.create_topics(specs)
        yield made
        made.producer.close()


def manifests(version: int) -> tuple[r.VersionManifest, r.VersionManifest]:
    deadline = Deadline.after(5, "stage")
    prepared = NoWeights().stage((), tied={}, epoch=0, version=version, parent=-1, step=version, deadline=deadline)
    return prepared, NoWeights().seal(prepared, deadline)


def test_a_run_is_followed_as_it_is_written_and_what_is_lost_is_named(place: Place) -> None:
    with closing(place.auditor()) as auditor:
        place.write(*manifests(0))
        run = synthetic_run(CODEC, steps=6, groups_per_step=2, group_size=4, n_tokens=8, moved_every=5)
        for n, transaction in enumerate(run):
            place.commit(transaction)
            if n % 6 == 5:
                place.pass_everything("rollout", "prompts")
                place.pass_everything("reward", "trajectories.completed")
                assert auditor.look(Deadline.after(60, "look")).violations == ()
        ledger = auditor.look(Deadline.after(60, "look"))
        assert (ledger.violations, ledger.admitted, ledger.trained) == ((), 48, 32)
        assert len(auditor.fold.settled) == 16  # all but the newest two steps, and what waits for the trainer
        assert ledger == place.audit()
        step = sample.training_step(
            5,
            epoch=0,
            trained=["data/0/8/0", "data/0/0/3"],
            offsets={str(p): end for p, end in place.ends("trajectories.scored").items()},
        )
        place.write(step)
        ledger = auditor.look(Deadline.after(60, "look"))
        assert ledger == place.audit()
    lost = {v.trajectory_id: v for v in ledger.violations if v.kind == "lost"}
    assert lost.keys() == {f"data/0/{g}/{m}" for g in (8, 9, 10, 11) for m in range(4)} - {"data/0/8/0"}
    (twice,) = (v for v in ledger.violations if v.kind == "trained_twice")
    stands = {f"training.steps[0]@{one.offset}": CODEC.decode(one.value or b"") for one in steps_of(place.log)}
    found = [stands[name] for name in twice.places]
    assert [one.step for one in found if isinstance(one, r.TrainingStep)] == [5, 1]
    scored = {
        f"{one.topic}[{one.partition}]@{one.offset}": CODEC.decode(one.value or b"")
        for one in read_topic(place.log, "trajectories.scored", Deadline.after(30, "read"))
    }
    for name, violation in lost.items():
        record = scored[violation.place]
        assert isinstance(record, r.ScoredTrajectory)
        assert record.trajectory.trajectory_id == name


def steps_of(log: Log) -> list[LogRecord]:
    return list(read_topic(log, "training.steps", Deadline.after(30, "read")))


def test_manifests_that_compaction_has_removed_are_not_missed(place: Place) -> None:
    then = int(time.time() * 1000) - TWO_DAYS_MS
    place.write(*[one for version in range(5) for one in manifests(version)], at_ms=then)
    place.write(*manifests(5))
    for transaction in synthetic_run(CODEC, steps=7, groups_per_step=1, group_size=2, n_tokens=8):
        place.commit(transaction)
    assert place.audit().violations == ()
    deadline = Deadline.after(60, "compaction")
    while len(list(read_topic(place.log, "weights.versions", deadline))) > 6:
        place.maintain()
        deadline.check("weights.versions is not compacted")
    ledger = place.audit()
    assert (ledger.violations, ledger.trained, ledger.incomplete) == ((), 10, ())
