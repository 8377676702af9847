"""The real broker, started by the first test that asks for it and shared by all of them: topic names must be unique."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laminar.streams.broker import Broker

__all__ = ["SESSION_S", "broker"]

SESSION_S = 3.0

# retention, compaction and time-outs within a test's patience
_IMPATIENT = {
    "log.initial.task.delay.ms": "200",
    "log.retention.check.interval.ms": "200",
    "log.cleaner.backoff.ms": "200",
    "log.segment.delete.delay.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("broker")
    with Broker(directory, port=0, session_timeout_s=SESSION_S, settings=_IMPATIENT) as running:
        yield running
