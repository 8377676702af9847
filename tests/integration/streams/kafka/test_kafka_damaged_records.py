"""Damage and dead letters on the real broker, with every operator at work (A14, B14, S6, S19)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.operators.rollout.engines.scripted import Answer
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Fenced
from laminar.streams.broker import Broker
from laminar.streams.dead import Desk
from laminar.streams.dead_letter import RETRY_OF
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import Log, OutRecord
from laminar.streams.namespace import NamespacedLog
from laminar.streams.reading import read_topic
from laminar.streams.topics import TOPICS, outgoing, topic_specs
from tests.support import sample
from tests.support.crew import Crew
from tests.support.damage import SETTLED, damaged, strangers

pytestmark = pytest.mark.kafka

WAIT_S = 180.0
COMPLETED = "trajectories.completed"


@pytest.fixture
def log(make_log: Callable[..., KafkaLog], unique: Callable[[str], str]) -> Iterator[Log]:
    """The whole catalogue under a prefix of its own."""
    kafka = make_log()
    prefix = f"{unique('crew')}."
    yield NamespacedLog(kafka, prefix)
    for name in kafka.topics():
        if name.startswith(prefix):
            kafka.delete_topic(name)


def test_a14_s6_damage_on_every_topic_at_once_stops_nothing(log: Log, tmp_path: Path) -> None:
    # Enough steps that the trainer reads the second damage before it is done: what comes after the end has no reader.
    with closing(Crew(tmp_path, log=log, eval_rows=2, partitions=2, steps=8)) as crew:
        broken = {topic: damaged(topic, crew.codec, large=topic == COMPLETED) for topic in TOPICS}
        for records in broken.values():
            crew.write(*records.values())
        crew.write(*strangers())
        crew.go(lambda: crew.steps_done() >= 1, seconds=WAIT_S)
        crew.write(*(one for records in broken.values() for kind, one in records.items() if kind != "60 MB"))
        settled = sum(2 * len(broken[topic]) for topic in SETTLED) - 1
        crew.go(lambda: len(crew.letters()) > settled, seconds=WAIT_S)
        crew.go(crew.ended, seconds=WAIT_S)
        assert Counter(letter.topic for letter in crew.letters() if letter.topic in TOPICS) == {
            topic: 2 * len(broken[topic]) - (topic == COMPLETED) for topic in SETTLED
        }
        assert crew.steps_done() == 8
        assert [e.n for e in crew.read("training.steps", r.Evaluation)] == [2, 2]
        for group, topic in (("run.rollout", "prompts"), ("run.reward", COMPLETED)):
            assert not any(log.lag(group, topic).values())
        large = next(x for x in crew.letters() if "60000010 bytes are left out" in x.error)
        assert large.value is None


def test_b14_a_member_that_always_fails_is_a_letter_and_has_one_fate_after_a_late_retry(
    log: Log, tmp_path: Path
) -> None:
    with closing(Crew(tmp_path, log=log, partitions=2, epochs=1, rows=4, steps=9)) as crew:
        crew.answer = lambda request: Answer(ids=(5, 6), fail_times=99 if request.trajectory_id.endswith("/2") else 0)
        crew.go(crew.ended, seconds=WAIT_S)
        members = sorted(letter.trajectory_ids[0] for letter in crew.letters())
        assert [m.rsplit("/", 1)[1] for m in members] == ["2"] * 4
        assert {letter.attempt for letter in crew.letters()} == {3}
        assert len(crew.fates()) == 4 * 3
    with closing(Desk(log, Codec(), "run", by="ada@lab", deadline=Deadline.after(WAIT_S, "desk"))) as desk:
        assert all(desk.retry(entry).done for entry in list(desk.register.entries.values()))
    with closing(Crew(tmp_path, log=log, partitions=2, epochs=2, rows=4, steps=9)) as crew:
        crew.go(lambda: crew.ended() and crew.steps_done() >= 4, seconds=WAIT_S)
        crew.rest(1.0)
        assert {crew.fates().get(m) for m in members} <= {"group_closed", None}
        ledger = crew.ledger()
        assert ledger.violations == ()
        assert ledger.dead == 0


def test_a_run_that_died_whole_is_trained_by_the_resumed_one_after_a_retry(log: Log, tmp_path: Path) -> None:
    with closing(Crew(tmp_path, log=log, partitions=2, epochs=1, rows=3, steps=9)) as crew:
        crew.broken_reward = True
        crew.go(crew.ended, seconds=WAIT_S)
        assert (crew.steps_done(), len(crew.letters())) == (0, 12)
    with closing(Desk(log, Codec(), "run", by="ada@lab", deadline=Deadline.after(WAIT_S, "desk"))) as desk:
        assert all(desk.retry(entry).done for entry in list(desk.register.entries.values()))
    with closing(Crew(tmp_path, log=log, partitions=2, epochs=1, rows=3, steps=9)) as crew:
        crew.go(lambda: crew.ended() and crew.steps_done() == 2, seconds=WAIT_S)
        ledger = crew.ledger()
        assert ledger.violations == ()
        assert (ledger.trained, ledger.dead) == (12, 0)


RETRIES = """
import sys, time
from laminar.schemas.codec import Codec
from laminar.streams.dead import Desk
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.namespace import NamespacedLog

log = NamespacedLog(KafkaLog(sys.argv[1]), sys.argv[2])
desk = Desk(log, Codec(), "run", by="script", deadline=Deadline.after(60, "desk"))
print("ready", flush=True)
for entry in list(desk.register.entries.values()):
    desk.retry(entry)
print("done", flush=True)
"""


def test_retries_that_are_killed_at_any_moment_happen_once_each(broker: Broker, log: Log, tmp_path: Path) -> None:
    n, rng = 40, random.Random(0)
    log.create_topics(topic_specs())
    codec = Codec()
    with closing(log.producer("writer")) as producer, producer.transaction() as tx:
        for index in range(n):
            made = sample.completed(sample.prompt(index))
            tx.send(outgoing(codec, made))
    originals = list(read_topic(log, COMPLETED, Deadline.after(WAIT_S, "read")))
    with closing(log.producer("writer")) as producer, producer.transaction() as tx:
        for source in originals:
            tx.send(
                outgoing(
                    codec,
                    r.DeadLetter(
                        operator="reward", kind="ValueError", error="no", topic=source.topic,
                        partition=source.partition, offset=source.offset, attempt=1, key=source.key,
                        value=source.value, at_ms=0,
                    ),
                )
            )  # fmt: skip
    assert isinstance(log, NamespacedLog)
    kills, finished = 0, False
    while not finished:
        with subprocess.Popen(
            [sys.executable, "-c", RETRIES, broker.bootstrap, log._names.prefix], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if kills < 2:
                time.sleep(rng.uniform(0.0, 0.15))
                process.send_signal(signal.SIGKILL)
                kills += 1
            finished = process.stdout.readline() == "done\n"
    standing = Counter(
        dict(x.headers)[RETRY_OF] for x in read_topic(log, COMPLETED, Deadline.after(WAIT_S, "read")) if x.headers
    )
    assert len(standing) == n
    assert set(standing.values()) == {1}


def test_of_two_people_who_decide_at_the_same_time_the_earlier_one_is_fenced(log: Log) -> None:
    log.create_topics(topic_specs())
    codec = Codec()
    letter = r.DeadLetter(
        operator="reward", kind="ValueError", error="no", topic=COMPLETED, partition=0, offset=0, attempt=1,
        key=b"data/0/0", value=b"v", at_ms=0,
    )  # fmt: skip
    with closing(log.producer("writer")) as producer, producer.transaction() as tx:
        tx.send(OutRecord(topic=COMPLETED, key=b"data/0/0", value=b"v", partition=0))
        tx.send(outgoing(codec, letter))
    deadline = Deadline.after(WAIT_S, "desks")
    with (
        closing(Desk(log, codec, "run", by="ada", deadline=deadline)) as ada,
        closing(Desk(log, codec, "run", by="bob", deadline=deadline)) as bob,
    ):
        with pytest.raises(Fenced):
            ada.retry(next(iter(ada.register.entries.values())))
        assert bob.retry(next(iter(bob.register.entries.values()))).done
    assert len(list(read_topic(log, COMPLETED, Deadline.after(WAIT_S, "read")))) == 2
