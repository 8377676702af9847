"""A rollout whose weights come from a relay on another machine: it samples while they travel (C4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens
from laminar.streams.deadline import Deadline
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from tests.support.dataflow import make_prompt
from tests.support.relays import RelayRun, far, relay_run
from tests.unit.operators.rollout.stage import ten


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RelayRun]:
    with relay_run(tmp_path) as made:
        yield made


def test_c4_tokens_decoded_while_a_pull_stands_still_carry_the_version_before(run: RelayRun) -> None:
    engine = ScriptedEngine(always(ten(100_000)), version_ids=True, max_model_len=100_010, kv_total=200_000)
    soon = Deadline.after(60.0, "read what was sampled")
    with far(run) as (proxy, publish, source):
        publish(0)
        config = RolloutConfig(updates="in_flight", poll_s=0.0)
        rollout = Rollout(config, run.context("rollout-0"), engine=engine, weights=source)

        def step_until(what: str, holds: object) -> None:
            deadline = Deadline.after(60.0, what)
            while not holds():  # type: ignore[operator]
                deadline.check()
                rollout.step(time.time())

        prompt = make_prompt(group_size=1, sampling=r.Sampling(max_tokens=100_000))
        with run.log.producer("test").transaction() as tx:
            tx.send(outgoing(run.codec, prompt))
        step_until("the first tokens", lambda: engine.stats().kv_used > 20)
        proxy.gate.clear()
        publish(1)
        before = engine.stats().kv_used
        step_until("500 tokens", lambda: engine.stats().kv_used > before + 500)
        assert (engine.version, engine.loads) == (0, [0])
        proxy.gate.set()
        step_until("the next version", lambda: engine.version == 1)
        before = engine.stats().kv_used
        step_until("100 tokens of it", lambda: engine.stats().kv_used > before + 100)
        while not rollout.drain(time.time()):
            pass
        rollout.close()
    events = [run.codec.decode(record.value or b"") for record in read_topic(run.log, "trajectories.partial", soon)]
    sampled = Tokens.concat([event.tokens for event in events if isinstance(event, r.TrajectoryTokens)])
    versions = sampled.versions_T.tolist()
    assert sampled.ids_T.tolist() == versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert versions.count(0) > 500
