"""A broker that takes less than is sent to it: by a quota on the producer, as the real ones have."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.broker import Broker, ensure_jars, find_java
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.loop import Loop
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from laminar.streams.worker import Inline
from tests.integration.streams.log_contract.driving import WAIT_S
from tests.support import sample
from tests.support.reward_group import reward_topics

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

IN, OUT = "trajectories.completed", "trajectories.scored"
CODEC = Codec()
QUOTA = 30_000
"""Bytes per second."""


def limit(broker: Broker, client_id: str) -> None:
    command = [str(find_java()), "-XX:TieredStopAtLevel=1", "-cp", f"{ensure_jars()}/*", "kafka.admin.ConfigCommand"]
    change = ["--alter", "--add-config", f"producer_byte_rate={QUOTA}", "--entity-type", "clients"]
    subprocess.run(
        [*command, "--bootstrap-server", broker.bootstrap, *change, "--entity-name", client_id],
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_s15_a_loop_faster_than_its_broker_waits_bounded_then_sends_less_at_once_and_loses_nothing(
    broker: Broker, make_log: Callable[..., KafkaLog], unique: Callable[[str], str]
) -> None:
    run = unique("run")
    limit(broker, f"{run}.reward-0")
    records = [sample.completed(sample.prompt(i), text=os.urandom(12_000).hex()) for i in range(38)]
    calls: list[r.Record] = []

    def score(record: r.Record) -> list[r.Record]:
        assert isinstance(record, r.CompletedTrajectory)
        calls.append(record)
        return [sample.scored(record)]

    log = make_log()
    with reward_topics(log, 1):
        with log.producer(unique("writer")).transaction() as tx:
            for record in records:
                tx.send(outgoing(CODEC, record))
        loop = Loop(
            log=make_log(request_timeout_s=1.5, transaction_timeout_s=10.0),
            codec=CODEC,
            name="reward",
            group=f"{run}.reward",
            instance="reward-0",
            transactional_id=f"{run}.reward-0",
            topics=[IN],
            worker=Inline(score),
            max_in_hand=32,
        )
        deadline = Deadline.after(4 * WAIT_S, "everything is scored")
        sizes, before, most = [], 0, 0
        while loop.counts.records < len(records):
            deadline.check(str(loop.counts))
            loop.step(time.time())
            most = max(most, loop.in_hand)
            if loop.counts.records > before:
                sizes.append(loop.counts.records - before)
                before = loop.counts.records
        found = [CODEC.decode(x.value or b"") for x in read_topic(log, OUT, Deadline.after(WAIT_S, "read"))]
        loop.close()
    assert sorted(x.trajectory.trajectory_id for x in found if isinstance(x, r.ScoredTrajectory)) == sorted(
        x.trajectory_id for x in records
    )
    assert len(calls) == len(records)
    assert loop.counts.rewinds > 0
    assert min(sizes) < 16
    assert most <= 2 * 32
