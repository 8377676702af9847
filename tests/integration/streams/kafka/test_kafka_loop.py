"""The generic loop on the real broker: exactly once, whatever it is fed and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form

import laminar.schemas
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DeadlineExceeded, Fenced, OffsetOutOfRange, Unavailable
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.loop import Loop
from laminar.streams.meter import Meter
from laminar.streams.metered import MeteredLog
from laminar.streams.reading import read_topic
from laminar.streams.skip import LostOffsets
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Function, Inline
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
BOTH = pytest.mark.parametrize("protocol", ["consumer", "classic"])


@contextmanager
def topics(log: KafkaLog, **limits: int) -> Iterator[None]:
    """The catalogue's own topics, for one test alone. ``keep_bytes``: retention of the input."""
    specs = [s for s in topic_specs({IN: 2, OUT: 2}) if s.name in (IN, OUT, DEAD)]
    if "keep_bytes" in limits:
        specs = [replace(s, retention_bytes=limits["keep_bytes"], max_record_bytes=200_000) for s in specs]
    else:
        specs = [replace(s, max_record_bytes=LIMIT) if s.name == OUT else s for s in specs]
    log.create_topics(specs)
    try:
        yield
    finally:
        for spec in specs:
            log.delete_topic(spec.name)


@pytest.fixture
def log(make_log: Make) -> Iterator[KafkaLog]:
    """A log with the topics; outputs are limited to LIMIT bytes."""
    log = make_log()
    with topics(log):
        yield log


@contextmanager
def standing_still(broker: Broker) -> Iterator[None]:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def score(record: r.Record) -> list[r.Record]:
    if isinstance(record, r.DrainCommand):
        record = FROM_A_NEWER_RELEASE
    assert isinstance(record, r.CompletedTrajectory)
    return [sample.scored(record)]


def make_loop(
    log: KafkaLog,
    run: str,
    instance: str = "reward-0",
    codec: Codec = CODEC,
    function: Function = score,
    **settings: Any,
) -> Loop:
    return Loop(
        log=log,
        codec=codec,
        name="reward",
        group=f"{run}.reward",
        instance=instance,
        transactional_id=f"{run}.{instance}",
        topics=[IN],
        worker=Inline(function),
        **settings,
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


def until(condition: Callable[[], bool], loop: Loop) -> None:
    """Step until it is so, or the loop raises."""
    deadline = Deadline.after(WAIT_S, "the loop is so far, or fails")
    while not condition():
        deadline.check()
        loop.step(time.time())
        time.sleep(0.002)


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


@BOTH
def test_s15_a_broker_that_stands_still_is_waited_for_and_the_unknown_commit_is_never_done_twice(
    broker: Broker, log: KafkaLog, make_log: Make, unique: Unique, protocol: str
) -> None:
    records = [sample.completed(sample.prompt(i)) for i in range(60)]
    run = unique("run")
    meter = Meter()
    patient = MeteredLog(make_log(group_protocol=protocol, request_timeout_s=2.0, transaction_timeout_s=20.0), meter)
    calls: list[r.Record] = []

    def counted(record: r.Record) -> list[r.Record]:
        calls.append(record)
        return score(record)

    loop = make_loop(patient, run, function=counted)
    write(log, unique("writer"), records[:30])
    drive([loop], log, run)
    write(log, unique("writer"), records[30:])
    take(loop)
    with standing_still(broker):
        until(lambda: loop.counts.rewinds > 0, loop)
        held = loop.in_hand
        loop.step(time.time())
        assert 0 < held == loop.in_hand  # nothing is polled, nothing forgotten
    drive([loop], log, run)
    assert scored_ids(log) == sorted(x.trajectory_id for x in records)
    # On a loaded machine the stop may outlast the member's session; then its work is the next owner's.
    assert len(calls) == 60 or meter.groups[f"{run}.reward"].revocations > 0


def test_s21_a_broker_that_stays_away_ends_the_loop_with_its_name(
    broker: Broker, log: KafkaLog, make_log: Make, unique: Unique
) -> None:
    run = unique("run")
    impatient = make_log(request_timeout_s=1.0, transaction_timeout_s=20.0)
    loop = make_loop(impatient, run, outage_s=3.0)
    write(log, unique("writer"), [sample.completed(sample.prompt(i)) for i in range(8)])
    take(loop)
    with standing_still(broker), pytest.raises((DeadlineExceeded, Unavailable), match=broker.bootstrap):
        until(lambda: False, loop)
    loop.close()
    impatient.close()  # the process ends
    try:
        drive([make_loop(log, run)], log, run)
    except Fenced:  # by what the first one had sent to a broker that stood still; its supervisor starts it again
        drive([make_loop(log, run)], log, run)
    assert len(scored_ids(log)) == 8


@pytest.mark.parametrize("policy", ["stop", "jump"])
def test_retention_that_passes_the_groups_offset_stops_the_loop_or_is_jumped_and_told(
    make_log: Make, unique: Unique, policy: LostOffsets
) -> None:
    log, run = make_log(), unique("run")
    with topics(log, keep_bytes=300_000):
        first = make_loop(log, run)
        write(log, unique("writer"), [sample.completed(sample.prompt(0))])
        drive([first], log, run)
        first.close()
        noise = [sample.completed(sample.prompt(i), text=os.urandom(90_000).hex()) for i in range(1, 30)]
        for record in noise:
            write(log, unique("writer"), [record])
        where, reader = TopicPartition(IN, 0), log.reader()
        deadline = Deadline.after(WAIT_S, "retention")
        while reader.bounds(where).start < 2:
            deadline.check()
            time.sleep(0.05)
        reader.close()
        committed = log.committed(f"{run}.reward", IN)[where]
        loop = make_loop(log, run, on_lost_offsets=policy)
        if policy == "stop":
            with pytest.raises(OffsetOutOfRange, match=rf"\[0\]@{committed} is wanted, readable is \d+ to \d+"):
                until(lambda: False, loop)
            return
        drive([loop], log, run)
        (told,) = [x for x in read(log, DEAD) if isinstance(x, r.OffsetsSkipped)]
        assert (told.topic, told.partition, told.from_offset) == (IN, 0, committed)
        assert told.to_offset > committed
        kept = {x.trajectory_id for x in noise} & set(scored_ids(log))
        assert 0 < len(kept) < len(noise)
        assert loop.counts.skipped == told.to_offset - committed


@BOTH
def test_a_loop_that_is_replaced_is_fenced_and_its_successor_doubles_nothing(
    log: KafkaLog, make_log: Make, unique: Unique, protocol: str
) -> None:
    records = [sample.completed(sample.prompt(i)) for i in range(20)]
    run = unique("run")
    zombie = make_loop(make_log(group_protocol=protocol), run)
    write(log, unique("writer"), records)
    take(zombie)
    successor = make_loop(make_log(group_protocol=protocol), run)
    with pytest.raises(Fenced):
        until(lambda: False, zombie)
    zombie.close()
    drive([successor], log, run)
    assert scored_ids(log) == sorted(x.trajectory_id for x in records)
