"""A producer that learns in the middle of sending that its transaction is not its own any more."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from laminar.schemas.errors import DeadlineExceeded, Fenced
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, Producer
from tests.integration.streams.log_contract.driving import WAIT_S, produce, read_values

pytestmark = pytest.mark.kafka


def send_for_long(producer: Producer, topic: str, after_the_first: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    with producer.transaction() as tx:
        while time.monotonic() < until:
            tx.send(OutRecord(topic=topic, key=b"k", value=b"lost", partition=0))
            time.sleep(0.3)
            after_the_first()
            after_the_first = lambda: None  # noqa: E731


def test_replaced_is_fenced(log: KafkaLog, topic: str, unique: Callable[[str], str]) -> None:
    producer = log.producer(unique("p"))
    with pytest.raises(Fenced, match="a newer owner of this transactional id exists"):
        send_for_long(producer, topic, lambda: log.producer(unique("p")))
    with pytest.raises(Fenced):
        produce(producer, topic, [b"lost"])
    assert read_values(log, topic) == []


def test_too_slow_is_a_deadline_and_the_next_transaction_goes_through(
    make_log: Callable[..., KafkaLog], topic: str, unique: Callable[[str], str]
) -> None:
    log = make_log(request_timeout_s=1.5, transaction_timeout_s=2.0)
    producer = log.producer(unique("p"))
    with pytest.raises(DeadlineExceeded, match="not within 2 s, the transaction timeout"):
        send_for_long(producer, topic, lambda: None)
    patient = make_log()
    produce(patient.producer(unique("p")), topic, [b"kept"])
    assert read_values(patient, topic) == [b"kept"]
