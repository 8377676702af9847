"""Rollouts and repack over the durable logs, in real time: what a killed rollout had in hand is finished once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laminar.operators.operator import Context
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.operator import Repack
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.streams.background import in_background
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.reading import read_topic
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support.dataflow import World, make_prompt
from tests.support.weights import NoWeights
from tests.unit.operators.rollout.stage import ten


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    if request.param == "sqlite":
        opened: Log = SqliteLog(tmp_path / "log")
    else:
        from laminar.streams.kafka import KafkaLog

        opened = KafkaLog(request.getfixturevalue("broker").bootstrap, compression="none")
    specs = topic_specs()
    opened.create_topics(specs)
    yield opened
    if request.param == "kafka":  # the broker is shared
        for spec in specs:
            opened.delete_topic(spec.name)
    opened.close()


def read(log: Log, context: Context, topic: str, kind: type) -> list[Any]:
    records = read_topic(log, topic, Deadline.after(30, f"read {topic}"))
    decoded = [context.codec.decode(record.value or b"") for record in records]
    return [one for one in decoded if isinstance(one, kind)]


@pytest.mark.parametrize("updates", ["pinned", "in_flight"])
def test_groups_of_a_killed_rollout_are_finished_once_on_a_real_log(log: Log, updates: r.UpdateMode) -> None:
    run_id = f"run-{time.time_ns()}"
    base = World().context("rollout")
    beside = None if isinstance(log, SqliteLog) else in_background  # as the runner has it
    base = replace(base, run=replace(base.run, run_id=run_id), log=log, clock=time.time, background=beside)
    producer = log.producer(f"{run_id}.test")

    def write(*records: r.Record) -> None:
        with producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(base.codec, record))

    def rollout(index: int) -> Rollout:
        config = RolloutConfig(updates=updates, delta_s=0.05, heartbeat_s=0.3, lease_s=30.0)
        engine = ScriptedEngine(
            always(ten(200)),
            max_running=16,
            tokens_per_s=200.0,
            clock=time.time,
            version_ids=updates == "in_flight",
        )
        return Rollout(config, replace(base, instance=f"rollout-{index}"), engine=engine, weights=NoWeights())

    weights = NoWeights()
    deadline = Deadline.after(90, "all members completed")

    def publish(version: int) -> None:
        made = weights.stage((), tied={}, epoch=1, version=version, parent=version - 1, step=version, deadline=deadline)
        write(weights.seal(made, deadline))

    publish(0)
    write(*[make_prompt(i, sampling=r.Sampling(max_tokens=500)) for i in range(8)])
    repack = Repack(RepackConfig(period_s=1.0, dead_after_s=2.0), replace(base, name="repack", instance="repack-0"))
    rollouts = {index: rollout(index) for index in range(2)}
    killed_at = 0.0
    n_completed = version = 0
    look_at = 0.0
    while n_completed < 32:
        deadline.check(f"{n_completed} of 32")
        now = time.time()
        worked = [operator.step(now) for operator in (*rollouts.values(), repack)]
        if not killed_at and any(one.n_settled > 20 for one in rollouts[0]._work.ledger):
            killed_at = now
            del rollouts[0]  # no drain, no close
        elif killed_at and 0 not in rollouts and now - killed_at > 1.0:
            rollouts[0] = rollout(0)
        if now >= look_at:
            look_at = now + 0.5
            n_completed = len(read(log, base, "trajectories.completed", r.CompletedTrajectory))
            if updates == "in_flight":
                version += 1
                publish(version)
        if not any(worked):
            time.sleep(0.002)
    completed = read(log, base, "trajectories.completed", r.CompletedTrajectory)
    started = read(log, base, "trajectories.partial", r.TrajectoryStarted)
    members = Counter(r.trajectory_id(f"d/0/{i}", m) for i in range(8) for m in range(4))
    assert Counter(one.trajectory_id for one in completed) == members
    assert Counter(one.trajectory_id for one in started) == members
    for one in completed:
        versions = one.response.versions_T.tolist()
        assert len(versions) == 200
        assert versions == sorted(versions)
        assert one.response.ids_T.tolist() == (versions if updates == "in_flight" else list(range(100, 300)))
    assert (max(len(set(one.response.versions_T.tolist())) for one in completed) > 1) == (updates == "in_flight")
    assert killed_at
    assert any(one.attempt for one in completed)
    assert sum(log.lag(base.group, "prompts").values()) == 0
    for operator in (*rollouts.values(), repack):
        operator.drain(time.time())
        operator.close()
    producer.close()
