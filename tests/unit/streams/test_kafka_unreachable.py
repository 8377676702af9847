"""What the Kafka adapter says when there is no broker, or the settings are wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from laminar.schemas.errors import ConfigError, Unavailable
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import TopicPartition, TopicSpec

NOBODY = "127.0.0.1:1"
WHERE = TopicPartition("t", 0)

CALLS: dict[str, Callable[[KafkaLog], object]] = {
    "topics": lambda log: log.topics(),
    "create": lambda log: log.create_topics([TopicSpec(name="t", partitions=1)]),
    "producer": lambda log: log.producer("p"),
    "consumer": lambda log: log.consumer("g", ["t"]),
    "lag": lambda log: log.lag("g", "t"),
    "bounds": lambda log: log.reader().bounds(WHERE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_without_a_broker_every_call_names_it_and_ends_in_one_line(call: Callable[[KafkaLog], object]) -> None:
    log = KafkaLog(NOBODY, request_timeout_s=0.3)
    with pytest.raises(Unavailable) as raised:
        call(log)
    assert NOBODY in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    log.close()


def test_nothing_is_asked_of_a_broker_before_the_first_call() -> None:
    KafkaLog(NOBODY).close()


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"no.such.setting": 1}, r"log\.client\.no\.such\.setting: librdkafka has no such setting$"),
        ({"sasl.pasword": "x"}, r"log\.client\.sasl\.pasword: .*\(did you mean 'sasl\.password'\?\)"),
        ({"security.protocol": "TLS"}, r"log\.client\.security\.protocol: not a valid value \(valid: PLAINTEXT, SSL, "),
        (
            {"security.protocol": "SSL", "ssl.ca.location": "/no/ca"},
            r"log\.client\.ssl\.ca\.location: cannot read /no/ca: ",
        ),
        ({"isolation.level": "read_uncommitted"}, r"log\.client\.isolation\.level: is set by laminar itself"),
    ],
)
def test_a_wrong_client_setting_is_a_config_error(client: dict[str, str | int | float | bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaLog(NOBODY, client=client).topics()


def test_values_of_client_settings_are_never_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("security.protocol", "client.dns.lookup", "socket.timeout.ms", "ssl.cipher.suites"):
        with pytest.raises(ConfigError, match=name) as raised:
            KafkaLog(NOBODY, client={"security.protocol": "SSL", name: "hunter2"}).topics()
        assert "hunter2" not in str(raised.value)
    log = KafkaLog(
        NOBODY,
        client={
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "user",
            "sasl.password": "hunter2",
        },
        request_timeout_s=0.2,
    )
    with pytest.raises(Unavailable) as unreachable:
        log.topics()
    assert "hunter2" not in f"{unreachable.value}{log!r}{vars(log._connection).keys()}"
    assert capfd.readouterr() == ("", "")


def test_a_request_may_not_outlast_its_transaction() -> None:
    with pytest.raises(ConfigError, match=r"request_timeout_s \(30\) must be below transaction_timeout_s \(30\)"):
        KafkaLog(NOBODY, request_timeout_s=30, transaction_timeout_s=30)


def test_an_identity_provider_that_is_away_is_an_outage() -> None:
    client: dict[str, str | int | float | bool] = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "laminar",
        "sasl.oauthbearer.client.secret": "not-to-be-shown",
        "sasl.oauthbearer.token.endpoint.url": f"http://{NOBODY}/token",
    }
    log = KafkaLog(NOBODY, request_timeout_s=1.0, client=client)
    with pytest.raises(Unavailable, match="Failed to acquire SASL OAUTHBEARER token: "):
        log.topics()
    log.close()
