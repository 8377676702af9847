from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import TopicSpec


@pytest.fixture
def make_log(broker: Broker) -> Iterator[Callable[..., KafkaLog]]:
    """Logs with settings of their own; all are closed at the end."""
    made: list[KafkaLog] = []

    def make(**settings: object) -> KafkaLog:
        made.append(KafkaLog(broker.bootstrap, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for log in made:
        log.close()


@pytest.fixture
def log(make_log: Callable[..., KafkaLog]) -> KafkaLog:
    return make_log()


@pytest.fixture
def unique() -> Callable[[str], str]:
    tag = uuid.uuid4().hex[:8]
    return lambda name: f"{name}-{tag}"


@pytest.fixture
def topic(log: KafkaLog, unique: Callable[[str], str]) -> str:
    """A topic of two partitions."""
    name = unique("topic")
    log.create_topics([TopicSpec(name=name, partitions=2)])
    return name
