"""What an operator's process answers to probes and scrapes, on the real broker where the case is about Kafka."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engines.scripted import ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.pipeline.notify import Notifier
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.meter import Meter
from laminar.streams.metered import MeteredLog
from laminar.streams.open import KafkaLogConfig, open_log
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs
from tests.integration.pipeline.operator_process import Process, free_port
from tests.integration.pipeline.supervised import wait_until
from tests.support import sample
from tests.support.dataflow import World, make_prompt
from tests.support.weights import NoWeights
from tests.unit.operators.rollout.stage import ten

ROOT = Path(__file__).parents[3]
OBEY = "tests.support.rewards:obey"
COMPLETED = "trajectories.completed"


class Run:
    """A run file in a folder, its log, and the processes that a test starts."""

    def __init__(self, folder: Path, log_section: str) -> None:
        self.folder = folder
        self.name = f"probe{uuid.uuid4().hex[:8]}"
        self.processes: list[Process] = []
        (folder / "run.yaml").write_text(
            f"name: {self.name}\nrun_dir: {folder}/run\nsteps: 2\ngroups_per_step: 1\ngroup_size: 4\n"
            f"model: {{path: {folder}/model}}\nlog: {log_section}\n"
            "operators: {reward: {kind: reward}, repack: {kind: repack}}\n"
            "monitor: {probe_period_s: 0.3, standby_after_s: 1}\n"
        )

    def start(self, name: str, *settings: str, env: Mapping[str, str] | None = None) -> Process:
        port = free_port()
        command = ("laminar.pipeline.cli", "operator", name, str(self.folder / "run.yaml"), "--port", str(port))
        given = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self.processes.append(Process(self.folder, *command, *settings, port=port, env=given))
        return self.processes[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, f"{{kind: sqlite, path: {tmp_path}/log}}")
    yield made
    for process in made.processes:
        process.popen.kill()
        process.wait()


@pytest.fixture
def kafka_run(tmp_path: Path, broker: Broker) -> Iterator[tuple[Run, Log]]:
    made = Run(tmp_path, f"{{kind: kafka, bootstrap: '{broker.bootstrap}'}}")
    with closing(open_log(KafkaLogConfig(bootstrap=broker.bootstrap), run_id=made.name)) as log:
        log.create_topics(topic_specs())
        yield made, log
        for process in made.processes:
            process.popen.kill()
            process.wait()
        for spec in topic_specs():  # the broker is shared
            log.delete_topic(spec.name)


def write(log: Log, *records: r.Record) -> None:
    with closing(log.producer(f"test-{uuid.uuid4()}")) as producer, producer.transaction() as tx:
        for record in records:
            tx.send(outgoing(Codec(), record))


def said(text: str, index: int) -> r.CompletedTrajectory:
    return sample.completed(sample.prompt(index), text=text)


def scored(log: Log) -> list[str]:
    read = read_topic(log, "trajectories.scored", Deadline.after(60, "read trajectories.scored"))
    found = [Codec().decode(record.value or b"") for record in read]
    return [one.trajectory.text for one in found if isinstance(one, r.ScoredTrajectory)]


def until(condition: Callable[[], bool], name: str) -> None:
    wait_until(condition, name, 90.0)


def until_ready(*processes: Process) -> None:
    for process in processes:
        process.wait_ready()
        until(lambda: process.probe("/readyz")[0] == 200, f"/readyz ({process.messages()})")  # noqa: B023


@pytest.mark.kafka
def test_a9_a_function_that_blocks_leaves_loop_heartbeats_and_probes_alone(kafka_run: tuple[Run, Log]) -> None:
    run, log = kafka_run
    process = run.start("reward", f"operators.reward.function={OBEY}", "operators.reward.timeout_s=120")
    until_ready(process)
    others = [said(f"return {n}", n) for n in range(1, 33)]
    write(log, said("sleep 5", 0), *others)  # longer than the broker's session timeout of 3 s
    until(lambda: process.total("laminar_consumer_lag_records") > 0, "the lag is seen")
    blocked = log.lag(f"{run.name}.reward", COMPLETED)
    steps = process.total("laminar_idle_steps_total")
    while len(set(scored(log))) < len(others) - len(others) // 4:
        assert process.probe("/livez")[0] == 200
        assert process.probe("/readyz")[0] == 200
        time.sleep(0.2)
    assert process.total("laminar_idle_steps_total") > steps
    until(lambda: len(scored(log)) == 33, "all are scored")
    assert sorted(scored(log)) == sorted(["sleep 5", *[one.text for one in others]])
    assert sum(blocked.values()) > 0
    assert process.metric("laminar_rebalances_total", group=f"{run.name}.reward", event="revoked") == 0
    assert process.total("laminar_longest_step_seconds") < 4.5  # the function slept for 5
    until(lambda: process.total("laminar_consumer_lag_records") == 0, "lag 0 on a transacted topic")
    assert process.metric("laminar_reward_latency_seconds_count") == 33
    assert process.metric("laminar_transactions_total", outcome="aborted") == 0


@pytest.mark.kafka
def test_a16_a_slow_judge_raises_the_lag_of_one_topic_and_holds_nothing_else(kafka_run: tuple[Run, Log]) -> None:
    run, log = kafka_run
    judge = run.start(
        "reward",
        f"operators.reward.function={OBEY}",
        "operators.reward.timeout_s=600",
        "operators.reward.max_in_hand=2",
    )
    until_ready(judge)
    write(log, *[said("sleep 500", n) for n in range(100, 116)])  # every partition has one in front
    meter = Meter()
    base = World().context("rollout")
    base = replace(base, run=replace(base.run, run_id=run.name), log=MeteredLog(log, meter), clock=time.time)
    weights = NoWeights()
    deadline = Deadline.after(120, "all groups are sampled")
    manifest = weights.stage((), tied={}, epoch=1, version=0, parent=-1, step=0, deadline=deadline)
    prompts = [make_prompt(i, sampling=r.Sampling(max_tokens=500)) for i in range(12)]
    write(log, weights.seal(manifest, deadline), *prompts)
    engine = ScriptedEngine(always(ten(20)), max_running=16)
    rollout = Rollout(RolloutConfig(heartbeat_s=0.2), base, engine=engine, weights=weights)
    while meter.written[COMPLETED].records < 48:
        deadline.check(f"{meter.written[COMPLETED].records} of 48")
        if not rollout.step(time.time()):
            time.sleep(0.002)
    rollout.drain(time.time())
    rollout.close()
    assert sum(log.lag(base.group, "prompts").values()) == 0
    assert meter.written["rollouts.status"].records > 0
    until(lambda: judge.total("laminar_consumer_lag_records") == 16 + 48, "the lag of one topic")
    assert judge.total("laminar_oldest_unprocessed_age_seconds") > 0
    topics = {dict(labels)["topic"] for (n, labels) in judge.metrics() if n == "laminar_consumer_lag_records"}
    assert topics == {COMPLETED}
    assert judge.probe("/livez")[0] == 200


@pytest.mark.kafka
def test_records_that_wait_without_progress_make_it_not_ready_with_topic_lag_and_since(
    kafka_run: tuple[Run, Log],
) -> None:
    run, log = kafka_run
    settings = (f"operators.reward.function={OBEY}", "operators.reward.timeout_s=600", "monitor.stuck_after_s=2")
    process = run.start("reward", *settings)
    until_ready(process)
    write(log, said("sleep 500", 0), said("sleep 500", 0), said("return 1", 0))
    until(lambda: process.probe("/readyz")[0] == 503, "not ready")
    reason = process.reasons()
    assert f"{COMPLETED}[" in reason
    assert "]: 3 records wait with no progress for" in reason
    assert f"since {time.strftime('%Y-')}" in reason
    assert process.probe("/healthz")[0] == 503
    assert process.probe("/livez")[0] == 200
    assert process.metric("laminar_ready") == 0
    process.popen.send_signal(signal.SIGKILL)


def test_a_standby_is_ready_too(run: Run) -> None:
    first, second = run.start("repack-0"), run.start("repack-1")
    until_ready(first, second)
    group = f"{run.name}.repack"
    owned = [process.metric("laminar_assigned_partitions", group=group) for process in (first, second)]
    assert sorted(n or 0 for n in owned) == [0, 1]
    assert [process.probe("/healthz")[1]["instance"] for process in (first, second)] == ["repack-0", "repack-1"]


def test_sigterm_makes_it_not_ready_at_once_while_it_drains_and_the_deadline_ends_that(run: Run) -> None:
    process = run.start("reward", f"operators.reward.function={OBEY}", "runner.drain_timeout_s=2")
    until_ready(process)
    with closing(open_sqlite(run)) as log:
        write(log, said("sleep 100", 0))
        until(lambda: process.total("laminar_records_read_total") >= 1, "it is in hand")
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: process.probe("/readyz")[0] == 503, "not ready")
        assert process.reasons() == "stopping: SIGTERM"
        assert process.probe("/livez")[0] == 200
        assert process.wait() == 0
        assert "leaving with work in hand, which its next owner does again: drain: not within 2 s" in process.messages()
        assert sum(log.lag(f"{run.name}.reward", COMPLETED).values()) == 1


def test_systemd_hears_ready_watchdog_and_stopping_and_nothing_of_a_loop_that_stands_still(run: Run) -> None:
    address = run.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(90)
        process = run.start("repack", env={"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "180000000"})
        assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == b"WATCHDOG=1"
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        systemd.setblocking(False)
        heard = []
        with suppress(BlockingIOError):
            while True:
                heard.append(systemd.recv(100))
        assert b"STOPPING=1" in heard
        notifier = Notifier({"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "1"})
        notifier.beat(["no step has finished for 61 s"])
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        notifier.beat([])
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_a_second_sigterm_leaves_at_once(run: Run) -> None:
    process = run.start("reward", f"operators.reward.function={OBEY}", "runner.drain_timeout_s=600")
    until_ready(process)
    with closing(open_sqlite(run)) as log:
        write(log, said("sleep 100", 0))
    until(lambda: process.total("laminar_records_read_total") >= 1, "it is in hand")
    process.popen.send_signal(signal.SIGTERM)
    until(lambda: "draining" in process.messages(), "draining")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "a second signal" in process.messages()


def open_sqlite(run: Run) -> Log:
    from laminar.streams.sqlite import SqliteLog

    return SqliteLog(run.folder / "log", owner=run.name)
