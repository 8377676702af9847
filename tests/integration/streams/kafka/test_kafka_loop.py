"""The generic loop on the real broker: exactly once, whatever it is fed and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form

import laminar.schemas
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DeadlineExceeded, Fenced, Unavailable
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.loop import Loop
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Inline
from tests.integration.streams.log_contract.driving import WAIT_S
from tests.support import sample

pytestmark = pytest.mark.kafka

PACKAGED = Path(laminar.schemas.__file__).parent / "avro"
IN, OUT, DEAD = "trajectories.completed", "trajectories.scored", "dead.letters"
CODEC = Codec()
LIMIT = 20_000
FROM_A_NEWER_RELEASE = sample.completed(sample.prompt(77))
Make = Callable[..., KafkaLog]
Unique = Callable[[str], str]


@pytest.fixture
def log(make_log: Make) -> Iterator[KafkaLog]:
    """The catalogue's own topics, for this test alone; outputs are limited to LIMIT bytes."""
    log = make_log()
    specs = [s for s in topic_specs({IN: 2, OUT: 2}) if s.name in (IN, OUT, DEAD)]
    log.create_topics([replace(s, max_record_bytes=LIMIT) if s.name == OUT else s for s in specs])
    yield log
    for spec in specs:
        log.delete_topic(spec.name)


def score(record: r.Record) -> list[r.Record]:
    if isinstance(record, r.DrainCommand):
        record = FROM_A_NEWER_RELEASE
    assert isinstance(record, r.CompletedTrajectory)
    return [sample.scored(record)]


def make_loop(log: KafkaLog, run: str, instance: str = "reward-0", codec: Codec = CODEC) -> Loop:
    return Loop(
        log=log,
        codec=codec,
        name="reward",
        group=f"{run}.reward",
        instance=instance,
        transactional_id=f"{run}.{instance}",
        topics=[IN],
        worker=Inline(score),
    )


def write(log: KafkaLog, name: str, records: Sequence[r.Record | bytes]) -> None:
    with log.producer(name).transaction() as tx:
        for record in records:
            if isinstance(record, bytes):
                tx.send(OutRecord(topic=IN, key=b"data/0/9", value=record, partition=0))
            else:
                tx.send(outgoing(CODEC, record, partition=0))


def drive(loops: Sequence[Loop], log: KafkaLog, run: str) -> None:
    """Step all of them until the group has committed everything."""
    deadline = Deadline.after(WAIT_S, "the lag reaches 0")
    next_look = 0.0
    while True:
        for loop in loops:
            loop.step(time.time())
        if time.monotonic() >= next_look:
            if not any(log.lag(f"{run}.reward", IN).values()):
                return
            next_look = time.monotonic() + 0.2
        deadline.check()
        time.sleep(0.005)


def step_on(loop: Loop) -> None:
    """Step until it raises."""
    deadline = Deadline.after(WAIT_S, "the loop fails")
    while not deadline.passed:
        loop.step(time.time())


def take(loop: Loop) -> None:
    """Poll until it holds records."""
    deadline = Deadline.after(WAIT_S, "the loop holds records")
    while not loop.in_hand:
        deadline.check()
        loop._poll(time.time(), draining=False)


def read(log: KafkaLog, topic: str, codec: Codec = CODEC) -> list[r.Record]:
    return [codec.decode(x.value or b"") for x in read_topic(log, topic, Deadline.after(WAIT_S, f"read {topic}"))]


def scored_ids(log: KafkaLog) -> list[str]:
    return sorted(x.trajectory.trajectory_id for x in read(log, OUT) if isinstance(x, r.ScoredTrajectory))


def written_by_a_newer_release(folder: Path) -> bytes:
    """A DrainCommand with a field that this release does not know; its schema goes into ``folder``."""
    newer = json.loads((PACKAGED / "drain_command.v1.avsc").read_text(encoding="utf-8"))
    newer["namespace"] = "laminar.v2"
    newer["fields"].append({"name": "grace_s", "type": "double", "default": 0.0})
    (folder / "drain_command.v2.avsc").write_text(json.dumps(newer), encoding="utf-8")
    digest = bytes.fromhex(fingerprint(to_parsing_canonical_form(newer), "CRC-64-AVRO"))
    body = CODEC.encode(r.DrainCommand(rollout_id="rollout-0", incarnation=5, at_ms=9))[10:]
    return b"\xc3\x01" + digest + body + b"\0" * 8


def test_s6_s8_s19_what_cannot_be_processed_is_a_dead_letter_and_the_rest_goes_through_once(
    log: KafkaLog, tmp_path: Path, unique: Unique
) -> None:
    first, last = sample.completed(sample.prompt(0)), sample.completed(sample.prompt(1))
    huge = sample.completed(sample.prompt(2), text="x" * LIMIT)
    run, newer = unique("run"), written_by_a_newer_release(tmp_path)
    loop = make_loop(log, run, codec=Codec(newer_schemas=tmp_path))
    write(log, unique("writer"), [first, b"no record", newer, huge, last])
    drive([loop], log, run)
    assert scored_ids(log) == sorted(x.trajectory_id for x in (first, FROM_A_NEWER_RELEASE, last))
    letters = [x for x in read(log, DEAD) if isinstance(x, r.DeadLetter)]
    assert {(x.offset, x.kind) for x in letters} == {(1, "DecodeError"), (3, "RecordTooLarge")}
    by_offset = {x.offset: x for x in letters}
    assert by_offset[1].value == b"no record"
    assert by_offset[3].trajectory_ids == (huge.trajectory_id,)
    assert log.committed(f"{run}.reward", IN) == {TopicPartition(IN, 0): 5}


def test_s15_a_broker_that_stands_still_is_back_pressure_and_after_it_nothing_is_lost_or_doubled(
    broker: Broker, log: KafkaLog, make_log: Make, unique: Unique
) -> None:
    records = [sample.completed(sample.prompt(i)) for i in range(60)]
    run = unique("run")
    patient = make_log(request_timeout_s=3.0, transaction_timeout_s=20.0)
    loop = make_loop(patient, run)
    write(log, unique("writer"), records[:30])
    drive([loop], log, run)
    write(log, unique("writer"), records[30:])
    take(loop)
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        with pytest.raises((DeadlineExceeded, Unavailable)):
            step_on(loop)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    loop.close()
    drive([make_loop(log, run)], log, run)
    assert scored_ids(log) == sorted(x.trajectory_id for x in records)


def test_a_loop_that_is_replaced_is_fenced_and_its_successor_doubles_nothing(
    log: KafkaLog, make_log: Make, unique: Unique
) -> None:
    records = [sample.completed(sample.prompt(i)) for i in range(20)]
    run = unique("run")
    zombie = make_loop(make_log(), run)
    write(log, unique("writer"), records)
    take(zombie)
    successor = make_loop(log, run)
    with pytest.raises(Fenced):
        step_on(zombie)
    zombie.close()
    drive([successor], log, run)
    assert scored_ids(log) == sorted(x.trajectory_id for x in records)
