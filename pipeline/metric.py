"""Every metric that a process exports, and the collector that reads them. ``docs/metrics.md`` says what each is for.

Each series carries ``run``, ``operator`` and ``replica`` (which of the operator's processes): ``instance`` and ``job``
belong to Prometheus, which sets them when it scrapes. Nothing is computed before somebody asks.

>>> METRICS["laminar_dead_letters"].kind
'counter'
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from laminar import __version__
from laminar.operators.measure import Measures
from laminar.pipeline.health import Health
from laminar.pipeline.health_watch import HealthWatch
from laminar.pipeline.pulse import STATES
from laminar.streams.log import TopicPartition
from laminar.streams.meter import OUTCOMES, Histogram, Meter
from laminar.streams.reading import skipped

__all__ = ["COMMON_LABELS", "METRICS", "MetricCollector", "MetricSpec", "exported_name"]

Kind = Literal["counter", "gauge", "histogram"]
COMMON_LABELS = ("run", "operator", "replica")
_TOPIC = ("topic",)
_PARTITION = ("topic", "partition")
_GROUP = ("group",)
_GROUP_PARTITION = ("group", "topic", "partition")
_DEAD = "dead.letters"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What a metric is."""

    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    """On top of COMMON_LABELS."""
    operator: str = ""
    """Kind of operator that has it; empty: all."""


METRICS: Mapping[str, MetricSpec] = {
    "laminar_build_info": MetricSpec("gauge", "Always 1; the version is a label", ("version",)),
    "laminar_state": MetricSpec("gauge", "1 for the state that the process is in", ("state",)),
    "laminar_live": MetricSpec("gauge", "1 if /livez answers 200"),
    "laminar_ready": MetricSpec("gauge", "1 if /readyz answers 200"),
    "laminar_loop_lag_seconds": MetricSpec("gauge", "Time since the loop last finished a step"),
    "laminar_step_duration_seconds": MetricSpec("histogram", "Duration of steps of the loop"),
    "laminar_longest_step_seconds": MetricSpec("gauge", "Longest step since the start"),
    "laminar_steps": MetricSpec("counter", "Steps that did something"),
    "laminar_idle_steps": MetricSpec("counter", "Steps that found nothing to do"),
    "laminar_last_progress_timestamp_seconds": MetricSpec(
        "gauge", "When the process last committed data or moved a committed offset on (at first: its start)"
    ),
    "laminar_transactions_begun": MetricSpec("counter", "Transactions begun"),
    "laminar_transactions": MetricSpec("counter", "Transactions by how they ended", ("outcome",)),
    "laminar_commit_duration_seconds": MetricSpec("histogram", "Duration of successful commits"),
    "laminar_records_read": MetricSpec("counter", "Records delivered, again after a rewind", _TOPIC),
    "laminar_bytes_read": MetricSpec("counter", "Bytes of their values", _TOPIC),
    "laminar_records_written": MetricSpec("counter", "Records in committed transactions", _TOPIC),
    "laminar_bytes_written": MetricSpec("counter", "Bytes of their values", _TOPIC),
    "laminar_dead_letters": MetricSpec("counter", "Records that the process wrote to dead.letters"),
    "laminar_records_skipped": MetricSpec("counter", "Records passed over: damaged, or of another topic"),
    "laminar_rebalances": MetricSpec(
        "counter", "Rebalances that gave (assigned) or took (revoked) partitions", ("group", "event")
    ),
    "laminar_assigned_partitions": MetricSpec("gauge", "Partitions that the process owns in the group", _GROUP),
    "laminar_last_poll_timestamp_seconds": MetricSpec("gauge", "Newest poll of the group's consumer", _GROUP),
    "laminar_consumer_lag_records": MetricSpec(
        "gauge", "Records of the partition that the group has not committed yet", _GROUP_PARTITION
    ),
    "laminar_consumer_committed_offset": MetricSpec("gauge", "Offset that the group has committed", _GROUP_PARTITION),
    "laminar_position_offset": MetricSpec("gauge", "Next offset that the process reads", _PARTITION),
    "laminar_oldest_unprocessed_age_seconds": MetricSpec(
        "gauge", "Age of the oldest record that the group has not committed yet; 0 if there is none", ("group", "topic")
    ),
    "laminar_last_probe_timestamp_seconds": MetricSpec("gauge", "When lag and offsets were last read from the log"),
    "laminar_probe_failures": MetricSpec("counter", "Times that the log did not say how much waits"),
    "laminar_reward_latency_seconds": MetricSpec(
        "histogram", "Duration of calls of the reward function, failed ones too", operator="reward"
    ),
    "laminar_rollout_running": MetricSpec("gauge", "Sequences being decoded", operator="rollout"),
    "laminar_rollout_waiting": MetricSpec("gauge", "Trajectories in hand that are not decoded now", operator="rollout"),
    "laminar_rollout_version": MetricSpec("gauge", "Policy version that the engine holds", operator="rollout"),
    "laminar_rollout_kv_used_tokens": MetricSpec("gauge", "Tokens in the KV cache", operator="rollout"),
    "laminar_rollout_kv_total_tokens": MetricSpec("gauge", "Tokens that the KV cache can hold", operator="rollout"),
    "laminar_rollout_tokens_per_second": MetricSpec("gauge", "Sampled between the last heartbeats", operator="rollout"),
    "laminar_rollout_preempted": MetricSpec(
        "gauge", "Sequences that gave up their KV cache to others, since the engine's start", operator="rollout"
    ),
    "laminar_rollout_engine_losses": MetricSpec(
        "gauge", "Times that the engine died, hung or was given up, and started anew", operator="rollout"
    ),
    "laminar_rollout_self_check_failures": MetricSpec(
        "gauge", "Self-checks since the start that found logprobs that are not the trainer's", operator="rollout"
    ),
    "laminar_rollout_self_check_difference_nats": MetricSpec(
        "gauge", "Largest difference of a logprob from the trainer's in the last self-check", operator="rollout"
    ),
    "laminar_trainer_step": MetricSpec("gauge", "Optimizer steps done in the run", operator="trainer"),
    "laminar_trainer_version": MetricSpec("gauge", "Policy version of the trainer", operator="trainer"),
    "laminar_trainer_epoch": MetricSpec("gauge", "Starts of the trainer in the run, from 0 on", operator="trainer"),
}
"""By name, a counter's without ``_total``."""


def exported_name(name: str) -> str:
    """The name as Prometheus sees it."""
    return f"{name}_total" if METRICS[name].kind == "counter" else name


class MetricCollector:
    """For a registry of prometheus-client. Reads what the loop and the health thread have written."""

    def __init__(
        self,
        labels: Mapping[str, str],
        *,
        health: Health,
        meter: Meter | None = None,
        measures: Measures | None = None,
        watch: HealthWatch | None = None,
    ) -> None:
        """``labels``: a value for each of COMMON_LABELS."""
        self._values = [labels[name] for name in COMMON_LABELS]
        self._health = health
        self.meter = meter
        self.measures = measures
        self.watch = watch

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client.registry.Collector."""
        yield self._one("laminar_build_info", {(__version__,): 1})
        yield from self._loop()
        if self.meter is not None:
            yield from self._log(self.meter)
        if self.watch is not None:
            yield from self._backlog(self.watch)
        if self.measures is not None:
            for name, value in self.measures.gauges.copy().items():
                yield self._one(f"laminar_{name}", {(): value})
            for name, histogram in self.measures.histograms.copy().items():
                yield self._histogram(f"laminar_{name}", histogram)

    def _loop(self) -> Iterator[Metric]:
        pulse = self._health.pulse
        yield self._one("laminar_state", {(state,): float(state == pulse.state) for state in STATES})
        yield self._one("laminar_live", {(): float(not self._health.not_live())})
        yield self._one("laminar_ready", {(): float(not self._health.not_ready())})
        yield self._one("laminar_loop_lag_seconds", {(): pulse.silent_s(self._health.clock())})
        yield self._histogram("laminar_step_duration_seconds", pulse.step_s)
        yield self._one("laminar_longest_step_seconds", {(): pulse.longest_step_s})
        yield self._one("laminar_steps", {(): pulse.steps})
        yield self._one("laminar_idle_steps", {(): pulse.idle_steps})

    def _log(self, meter: Meter) -> Iterator[Metric]:
        epoch = time.time() - meter.clock()
        read, written, groups = meter.read.copy(), meter.written.copy(), meter.groups.copy()
        yield self._one("laminar_last_progress_timestamp_seconds", {(): epoch + meter.progress_at})
        yield self._one("laminar_transactions_begun", {(): meter.begun})
        yield self._one("laminar_transactions", {(name,): meter.outcomes[name] for name in OUTCOMES})
        yield self._histogram("laminar_commit_duration_seconds", meter.commit_s)
        yield self._one("laminar_records_read", {(topic,): count.records for topic, count in read.items()})
        yield self._one("laminar_bytes_read", {(topic,): count.bytes for topic, count in read.items()})
        yield self._one("laminar_records_written", {(topic,): count.records for topic, count in written.items()})
        yield self._one("laminar_bytes_written", {(topic,): count.bytes for topic, count in written.items()})
        yield self._one("laminar_dead_letters", {(): written[_DEAD].records if _DEAD in written else 0})
        yield self._one("laminar_records_skipped", {(): sum(skipped.copy().values())})
        rebalances = {(name, "assigned"): count.assignments for name, count in groups.items()}
        rebalances |= {(name, "revoked"): count.revocations for name, count in groups.items()}
        yield self._one("laminar_rebalances", rebalances)
        yield self._one("laminar_assigned_partitions", {(name,): len(g.assigned) for name, g in groups.items()})
        polled = {(name,): epoch + count.polled_at for name, count in groups.items() if count.polled_at}
        yield self._one("laminar_last_poll_timestamp_seconds", polled)
        yield self._one("laminar_position_offset", {_split(p): at for p, at in meter.positions.copy().items()})

    def _backlog(self, watch: HealthWatch) -> Iterator[Metric]:
        yield self._one("laminar_last_probe_timestamp_seconds", {(): watch.answered_at})
        yield self._one("laminar_probe_failures", {(): watch.failures})
        backlog = watch.backlog
        if backlog is None:
            return
        group, topic, mine = backlog.consumption.group, backlog.consumption.topic, sorted(backlog.assigned)
        yield self._one("laminar_consumer_lag_records", {(group, *_split(p)): backlog.lag.get(p, 0) for p in mine})
        committed = {(group, *_split(p)): backlog.committed[p] for p in mine if p in backlog.committed}
        yield self._one("laminar_consumer_committed_offset", committed)
        oldest = min(backlog.oldest_ms.values(), default=math.inf)
        yield self._one(
            "laminar_oldest_unprocessed_age_seconds", {(group, topic): max(0.0, time.time() - oldest / 1000)}
        )

    def _one(self, name: str, series: Mapping[Any, float]) -> Metric:
        spec = METRICS[name]
        family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        metric = family(name, spec.doc, labels=[*COMMON_LABELS, *spec.labels])
        for labels, value in series.items():
            metric.add_metric([*self._values, *labels], value)
        return metric

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(name, METRICS[name].doc, labels=COMMON_LABELS)
        buckets = [("+Inf" if bound == math.inf else repr(bound), n) for bound, n in histogram.cumulative()]
        metric.add_metric(self._values, buckets, histogram.total)
        return metric


def _split(partition: TopicPartition) -> tuple[str, str]:
    return partition.topic, str(partition.partition)
