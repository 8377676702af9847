"""How the log's contract suite gets at Kafka."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from tests.integration.streams.log_contract.conftest import Handles


@pytest.fixture
def kafka_handles(broker: Broker) -> Handles:
    return Handles(open=lambda: KafkaLog(broker.bootstrap, compression="none"), vanish=vanish, replaces_instances=False)


def vanish(consumer: Any) -> None:
    """A member that dies without a word: its client is destroyed without leaving the group."""
    consumer._intake.client = None
    consumer._closed = True
    gc.collect()
