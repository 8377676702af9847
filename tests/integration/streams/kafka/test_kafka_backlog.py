"""Memory and rebalances, as the benchmarks measure them, in small."""

from __future__ import annotations

from typing import Literal

import pytest

from benchmarks import backlog, rebalance
from laminar.streams.broker import Broker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_s13_a_slow_consumer_of_a_backlog_stays_within_its_budget(broker: Broker) -> None:
    found = backlog.measure(
        broker.bootstrap, broker.directory, value_bytes=1_000_000, total_mb=300.0, seconds=6.0, pause_s=0.05
    )
    assert found.read > 0
    assert found.mb < backlog.BUDGET_MB


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_four_processes_and_32_partitions_are_stable_after_two_rounds_and_nothing_is_lost_or_doubled(
    broker: Broker, protocol: Literal["consumer", "classic"]
) -> None:
    found = rebalance.measure(broker.bootstrap, protocol, full=False, session_s=6.0)
    joined, restarted = found.changes
    assert 0 < joined.rounds <= 2
    assert joined.moved >= 8
    assert restarted.rounds <= 2 * restarted.changes
    assert protocol == "classic" or restarted.moved == 0
    assert found.records > 0
    assert (found.lost, found.doubled) == (0, 0)
    print({change.name: round(change.pause_s, 2) for change in found.changes})  # noqa: T201
