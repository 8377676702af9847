from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from laminar.operators.measure import Measures
from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.health import Backlog, Health, Readiness
from laminar.pipeline.health_watch import HealthWatch, look
from laminar.pipeline.lag import Consumption
from laminar.pipeline.metric import COMMON_LABELS, METRICS, MetricCollector, exported_name
from laminar.pipeline.pulse import Pulse
from laminar.streams.deadline import Deadline
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.memory import MemoryBroker, MemoryLog
from laminar.streams.memory.faults import NoFaults
from laminar.streams.meter import Meter
from laminar.streams.metered import MeteredLog

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
TOPIC = "trajectories.completed"
READS = Consumption(topic=TOPIC, group="run.reward", operator="reward", progress="offsets")


class Bench:
    """A process that has read one of two records, as its collector sees it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(time.time)
        self.meter, self.measures, self.pulse = Meter(), Measures(), Pulse(state="running")
        log = MeteredLog(MemoryLog(broker=self.broker), self.meter)
        log.create_topics([TopicSpec(name=TOPIC, partitions=1), TopicSpec(name="dead.letters", partitions=1)])
        self.log, self.consumer = log, log.consumer(READS.group, [TOPIC])
        old_ms = int((time.time() - 100) * 1000)
        with log.producer("p").transaction() as tx:
            for _ in range(2):
                tx.send(OutRecord(topic=TOPIC, key=b"k", value=b"12345", timestamp_ms=old_ms))
            tx.send(OutRecord(topic="dead.letters", key=b"k", value=b"1"))
        while self.meter.read[TOPIC].records < 2:
            self.consumer.poll(1, 0.1)
        self.commit(1)
        settings = MonitorConfig(probe_period_s=0.05)
        self.readiness = Readiness(settings, consumption=READS, now=time.monotonic())
        self.watch = HealthWatch(
            open_log=lambda: MemoryLog(broker=self.broker),
            consumption=READS,
            readiness=self.readiness,
            meter=self.meter,
            pulse=self.pulse,
            settings=settings,
            slow_step_s=1000,
        )
        self.health = Health(self.pulse, self.readiness, settings, stopping=lambda: "")
        self.registry = CollectorRegistry()
        labels = {"run": "first", "operator": "reward", "replica": "0"}
        self.registry.register(
            MetricCollector(labels, health=self.health, meter=self.meter, measures=self.measures, watch=self.watch)
        )

    def commit(self, offset: int) -> None:
        with self.log.producer("p").transaction() as tx:
            tx.commit_offsets(self.consumer.membership(), {TopicPartition(TOPIC, 0): offset})

    def backlog(self) -> Backlog:
        deadline = Deadline.after(30, "a look at the log")
        while self.watch.backlog is None:
            deadline.check()
            time.sleep(0.01)
        return self.watch.backlog

    def value(self, name: str, **labels: str) -> float | None:
        common = {"run": "first", "operator": "reward", "replica": "0"}
        return self.registry.get_sample_value(name, {**common, **labels})


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.watch.close()


def test_lag_and_age_are_those_of_the_first_record_that_is_not_committed(bench: Bench) -> None:
    bench.backlog()
    where = {"group": "run.reward", "topic": TOPIC, "partition": "0"}
    assert bench.value("laminar_consumer_lag_records", **where) == 1
    assert bench.value("laminar_consumer_committed_offset", **where) == 1
    age = bench.value("laminar_oldest_unprocessed_age_seconds", group="run.reward", topic=TOPIC)
    assert age is not None
    assert 100 <= age < 200
    assert bench.value("laminar_ready") == 1
    assert bench.value("laminar_assigned_partitions", group="run.reward") == 1


def test_the_age_is_0_when_nothing_waits(bench: Bench) -> None:
    bench.commit(2)
    deadline = Deadline.after(30, "a look at the log")
    while sum(bench.backlog().lag.values()):
        deadline.check()
        time.sleep(0.01)
    assert bench.value("laminar_oldest_unprocessed_age_seconds", group="run.reward", topic=TOPIC) == 0


def test_counters_are_those_of_the_process(bench: Bench) -> None:
    assert bench.value("laminar_records_read_total", topic=TOPIC) == 2
    assert bench.value("laminar_bytes_read_total", topic=TOPIC) == 10
    assert bench.value("laminar_transactions_total", outcome="committed") == 2
    assert bench.value("laminar_transactions_total", outcome="aborted") == 0
    assert bench.value("laminar_dead_letters_total") == 1
    assert bench.value("laminar_rebalances_total", group="run.reward", event="assigned") == 1


def test_what_is_exported_is_what_is_declared_with_its_labels(bench: Bench) -> None:
    bench.backlog()
    for name, spec in METRICS.items():
        if spec.operator and spec.kind == "gauge":
            bench.measures.gauges[name.removeprefix("laminar_")] = 1.0
    bench.measures.histogram("reward_latency_seconds").observe(0.2)
    text = generate_latest(bench.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {n: s.kind for n, s in METRICS.items()}
    for name, family in families.items():
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*COMMON_LABELS, *METRICS[name].labels}, name


def test_names_follow_the_conventions() -> None:
    for name, spec in METRICS.items():
        assert re.fullmatch(r"laminar(_[a-z]+)+", name)
        assert not name.endswith(("_total", "_count", "_sum", "_ms", "_milliseconds", "_kb"))
        assert spec.kind != "histogram" or name.endswith("_seconds")


def test_the_table_in_the_documents_lists_every_metric_with_type_and_labels() -> None:
    rows = re.findall(r"^\| `(laminar_\w+)` \| (\w+) \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    table = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(rows) == len(table)
    assert table == {exported_name(name): (spec.kind, spec.labels) for name, spec in METRICS.items()}


def test_what_an_operator_measures_is_declared() -> None:
    root = Path(__file__).parents[3] / "operators"
    found = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'measures\.histogram\("(\w+)"\)', text)) - {"name"}
        for call in re.findall(r"measures\.gauges\.update\((.*?)\)\n", text, re.DOTALL):
            found |= set(re.findall(r"(\w+)=", call))
    declared = {name.removeprefix("laminar_") for name, spec in METRICS.items() if spec.operator}
    assert found == declared


def test_a_look_reads_again_only_what_has_moved(bench: Bench) -> None:
    log = MemoryLog(broker=bench.broker)
    reader = log.reader()
    first = look(log, reader, READS, meter=bench.meter, pulse=bench.pulse)
    (partition,) = first.oldest_ms
    told = Backlog(
        consumption=READS,
        lag=first.lag,
        committed=first.committed,
        assigned=first.assigned,
        waiting=first.waiting,
        oldest_ms={partition: 7},
    )
    assert look(log, reader, READS, meter=bench.meter, pulse=bench.pulse, before=told).oldest_ms == {partition: 7}


class Away(NoFaults):
    """A broker that does not answer while ``gone``."""

    gone = False

    def away(self) -> bool:
        return self.gone


def test_a_log_that_goes_away_is_counted_said_once_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    broker, faults, pulse = MemoryBroker(time.time), Away(), Pulse(state="running")
    MemoryLog(broker=broker).create_topics([TopicSpec(name=TOPIC, partitions=1)])
    settings = MonitorConfig(probe_period_s=0.02, unanswered_after_s=0.05, standby_after_s=0.01)
    readiness = Readiness(settings, consumption=READS, now=time.monotonic())

    def until(condition: Callable[[], bool]) -> None:
        deadline = Deadline.after(30, "a look at the log")
        while not condition():
            deadline.check()
            time.sleep(0.01)

    with caplog.at_level(logging.INFO):
        watch = HealthWatch(
            open_log=lambda: MemoryLog(broker=broker, faults=faults),
            consumption=READS,
            readiness=readiness,
            meter=Meter(),
            pulse=pulse,
            settings=settings,
            slow_step_s=1000,
        )
        until(lambda: not readiness.reasons(time.monotonic()))
        faults.gone = True
        until(lambda: bool(readiness.reasons(time.monotonic())) and watch.failures > 2)
        assert "the log has not answered for" in readiness.reasons(time.monotonic())[0]
        faults.gone = False
        until(lambda: not readiness.reasons(time.monotonic()))
        watch.close()
    said = [record.getMessage() for record in caplog.records if record.name.endswith("health_watch")]
    assert [text.split(":")[0] for text in said] == ["the log does not say how much waits", "the log answers again"]
