"""The rollout operator over a real log: it takes the prompts from there, and writes every token, result and heartbeat.

Its time runs from the step that takes the first group to the commit of the last result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.rollout.cost import Cost, Meter
from benchmarks.rollout.workload import GROUP, Workload, manifest
from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Delta, Engine, EngineRequest
from laminar.operators.rollout.operator import Rollout
from laminar.operators.weights import TensorView
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Unavailable
from laminar.schemas.records import Prompt, VersionManifest
from laminar.streams.background import in_background
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.open import KafkaLogConfig, SqliteLogConfig, open_log
from laminar.streams.topics import outgoing, topic_specs

__all__ = ["Watched", "context_of", "open_bench_log", "put", "rollout_of", "run_operator", "turn"]

_ROUND_S = 300.0


class Watched:
    """An engine that outlives the operator, and counts what went in and came out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.n_submitted = self.n_finished = self.n_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: EngineRequest) -> None:
        """See Engine.submit."""
        self.engine.submit(request)
        self.n_submitted += 1

    def poll(self, timeout_s: float) -> list[Delta]:
        """See Engine.poll."""
        deltas = self.engine.poll(timeout_s)
        for delta in deltas:
            self.n_tokens += delta.tokens.n_tokens
            self.n_finished += delta.finish is not None
        return deltas

    def close(self) -> None:
        """Nothing: it is used again."""


class _NoWeights:
    """Nobody asks: the engine holds the only version."""

    def open(self, manifest: VersionManifest, deadline: Deadline) -> AbstractContextManager[Mapping[str, TensorView]]:  # noqa: ARG002
        raise Unavailable("no weights here")


def open_bench_log(kind: str, folder: Path, bootstrap: str) -> Log:
    """A new log with all topics and the only version. Prompts have one partition: they come in the order of writing."""
    partitions = {"prompts": 1}
    config = (
        SqliteLogConfig(path=folder / "log", partitions=partitions)
        if kind == "sqlite"
        else KafkaLogConfig(bootstrap=bootstrap, topic_prefix=f"{folder.name}.", partitions=partitions)
    )
    log = open_log(config, run_id="bench")
    log.create_topics(topic_specs(partitions))
    put(log, [manifest()])
    return log


def context_of(log: Log, kind: str, folder: Path) -> Context:
    """What the runner would give to the operator."""
    run = RunInfo(
        run_id="bench",
        run_dir=folder,
        steps=1,
        groups_per_step=1,
        group_size=GROUP,
        max_staleness=None,
        seed=0,
        model=ModelConfig(path=folder),
    )
    return Context(
        run=run,
        name="rollout",
        instance="rollout-0",
        log=log,
        codec=Codec(),
        background=in_background if kind == "kafka" else None,
    )


def put(log: Log, records: list[VersionManifest] | list[Prompt]) -> None:
    """Write them as somebody else."""
    producer, codec = log.producer("bench.somebody"), Codec()
    with producer.transaction() as tx:
        for record in records:
            tx.send(outgoing(codec, record))
    producer.close()


def rollout_of(watched: Any, context: Context, config: RolloutConfig) -> Rollout:
    """An operator around an engine that holds the version."""
    return Rollout(config, context, engine=watched, weights=_NoWeights())


def turn(rollout: Rollout, idle_s: float) -> float:
    """A step, and a rest when nothing was done, as in the runner; returns the next rest."""
    if rollout.step(time.time()):
        return 0.001
    time.sleep(idle_s)
    return min(2 * idle_s, 0.02)


def run_operator(watched: Watched, context: Context, config: RolloutConfig, workload: Workload, round_: int) -> Cost:
    """All groups of a round."""
    put(context.log, list(workload.groups(round_)))
    watched.n_submitted = watched.n_finished = watched.n_tokens = 0
    rollout = rollout_of(watched, context, config)
    deadline = Deadline.after(_ROUND_S, "a round of the benchmark")
    meter, idle_s = Meter(), 0.001
    while watched.n_finished < workload.n_responses:
        deadline.check(f"{watched.n_finished} of {workload.n_responses} responses")
        if not watched.n_submitted:
            meter = Meter()
        idle_s = turn(rollout, idle_s)
    while not rollout.drain(time.time()):
        pass
    cost = meter.read()
    rollout.close()
    if watched.n_tokens != workload.n_tokens:
        raise AssertionError(f"the operator returned {watched.n_tokens} tokens of {workload.n_tokens}")
    return cost
