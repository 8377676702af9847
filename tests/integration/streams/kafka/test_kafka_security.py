"""A broker that requires TLS, passwords and permissions: what works against it, and the one line of each refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.schemas.errors import ConfigError, LaminarError, Unavailable
from laminar.streams.broker import Authority, Broker, Security
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import WAIT_S, poll_some, produce, read_values

pytestmark = pytest.mark.kafka

USERS = {"admin": "admin-of-the-tests", "alice": "wonderland-7", "bob": "builder-9"}
PATIENCE_S = 2.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("stranger"), "somebody else")


@pytest.fixture(scope="module")
def secured(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """SASL_SSL with SCRAM, and permissions; ``admin`` may do everything, the others what they were granted."""
    security = Security(authority=authority, users=USERS, permissions=True, super_users=("admin",))
    with Broker(tmp_path_factory.mktemp("secured"), port=0, session_timeout_s=3.0, security=security) as running:
        with closing(as_user(running, "admin")) as log:
            log.create_topics([TopicSpec(name="in", partitions=2), TopicSpec(name="out", partitions=2)])
            produce(log.producer("admin-0"), "in", [b"1", b"2"])
        running.allow("bob", "topic", "in", ["DESCRIBE", "DESCRIBE_CONFIGS", "READ"])
        running.allow("bob", "topic", "out", ["DESCRIBE", "DESCRIBE_CONFIGS"])
        running.allow("bob", "transactional_id", "bob-", ["WRITE", "DESCRIBE"], prefixed=True)
        running.allow("bob", "group", "bobs", ["READ"])
        yield running


@pytest.fixture(scope="module")
def by_certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Mutual TLS: no passwords."""
    security = Security(authority=authority, client_certificates=True)
    with Broker(tmp_path_factory.mktemp("mutual"), port=0, security=security) as running:
        yield running


def as_user(broker: Broker, user: str, **changes: str | None) -> KafkaLog:
    return KafkaLog(broker.bootstrap, client=settings_of(broker, user, **changes))


def impatient(broker: Broker, user: str, **changes: str | None) -> KafkaLog:
    return KafkaLog(broker.bootstrap, client=settings_of(broker, user, **changes), request_timeout_s=PATIENCE_S)


def settings_of(broker: Broker, user: str, **changes: str | None) -> dict[str, str]:
    """Those that let the user in, with changes; None takes one away."""
    return {name: value for name, value in {**broker.security.client(user), **changes}.items() if value is not None}


def refusal(log: KafkaLog, call: Callable[[KafkaLog], object], kind: type[LaminarError]) -> str:
    """The one line, which came in time and holds no password."""
    began = time.monotonic()
    with closing(log), pytest.raises(LaminarError) as raised:
        call(log)
    assert time.monotonic() - began < WAIT_S
    text = str(raised.value)
    assert type(raised.value) is kind, text
    assert "\n" not in text
    assert not any(password in text for password in USERS.values())
    return text


def topics(log: KafkaLog) -> object:
    return log.topics()


def test_by_password_over_tls_a_group_consumes_and_a_transaction_commits(secured: Broker) -> None:
    with closing(as_user(secured, "admin")) as log:
        consumer = log.consumer("admins", ["in"])
        assert sorted(r.value or b"" for r in poll_some(consumer, 2)) == [b"1", b"2"]
        with log.producer("admin-0").transaction() as transaction:
            transaction.send(OutRecord(topic="out", key=b"k", value=b"3"))
            transaction.commit_offsets(consumer.membership(), consumer.position())
        assert read_values(log, "out") == [b"3"]
        assert log.lag("admins", "in") == {TopicPartition("in", 0): 0, TopicPartition("in", 1): 0}


def test_a_client_certificate_lets_in_also_with_an_encrypted_key(by_certificate: Broker, authority: Authority) -> None:
    plain, encrypted = authority.issue("carol"), authority.issue("dora", password="hunter2")
    shown = {"ssl.certificate.location": str(plain.chain), "ssl.key.location": str(plain.key)}
    with closing(as_user(by_certificate, "carol", **shown)) as log:
        assert log.topics() == {}
    shown = {"ssl.certificate.location": str(encrypted.chain), "ssl.key.location": str(encrypted.key)}
    with closing(as_user(by_certificate, "dora", **shown, **{"ssl.key.password": "hunter2"})) as log:
        assert log.topics() == {}
    text = refusal(impatient(by_certificate, "dora", **shown, **{"ssl.key.password": "hunter3"}), topics, ConfigError)
    assert "log.client.ssl.key.location: " in text
    assert "ssl.key.password is missing or wrong" in text
    assert "hunter3" not in text


def test_wrong_credentials(secured: Broker) -> None:
    text = refusal(impatient(secured, "alice", **{"sasl.password": "no-such-word"}), topics, ConfigError)
    assert "log.client.sasl.username, sasl.password: " in text
    assert "does not accept the user 'alice'" in text
    assert "no-such-word" not in text
    text = refusal(impatient(secured, "alice", **{"sasl.mechanism": "PLAIN"}), topics, ConfigError)
    assert f"log.client.sasl.mechanism: {secured.bootstrap} takes SCRAM-SHA-512, not PLAIN" in text


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT"])
def test_another_protocol_than_the_brokers(secured: Broker, protocol: str) -> None:
    text = refusal(impatient(secured, "alice", **{"security.protocol": protocol}), topics, ConfigError)
    assert text == (
        f"log.client.security.protocol: {secured.bootstrap} speaks TLS and asks for a login by SCRAM-SHA-512: "
        f"set SASL_SSL, not {protocol}"
    )


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL", "SASL_PLAINTEXT"])
def test_security_towards_a_broker_that_has_none(secured: Broker, broker: Broker, protocol: str) -> None:
    client = settings_of(secured, "alice", **{"security.protocol": protocol})
    text = refusal(KafkaLog(broker.bootstrap, client=client, request_timeout_s=PATIENCE_S), topics, ConfigError)
    assert text.startswith(f"log.client.security.protocol: {broker.bootstrap} speaks no TLS")
    assert text.endswith(f": set PLAINTEXT, not {protocol}")


def test_a_certificate_that_nobody_trusted_signed(secured: Broker, stranger: Authority) -> None:
    for trusted in (str(stranger.trust), None):
        text = refusal(impatient(secured, "alice", **{"ssl.ca.location": trusted}), topics, ConfigError)
        assert f"log.client.ssl.ca.location: the certificate of {secured.bootstrap} is not accepted (" in text
        assert "name the PEM file of the authority that signed it" in text


def test_a_client_without_a_certificate_where_one_is_wanted(by_certificate: Broker, stranger: Authority) -> None:
    text = refusal(impatient(by_certificate, "eve"), topics, ConfigError)
    assert f"log.client.ssl.certificate.location: {by_certificate.bootstrap} wants a certificate" in text
    eve = stranger.issue("eve")
    shown = {"ssl.certificate.location": str(eve.chain), "ssl.key.location": str(eve.key)}
    text = refusal(impatient(by_certificate, "eve", **shown), topics, ConfigError)
    assert "wants a certificate of a client that it trusts" in text


def test_a_certificate_for_another_host(authority: Authority, tmp_path: Path) -> None:
    other = authority.issue("other-host", ["other.example"]).store()
    settings = {"ssl.keystore.location": str(other)}
    with Broker(tmp_path, port=0, security=Security(authority=authority), settings=settings) as broker:
        text = refusal(impatient(broker, ""), topics, ConfigError)
        assert "is not accepted (IP address mismatch" in text
        with closing(as_user(broker, "", **{"ssl.endpoint.identification.algorithm": "none"})) as log:
            assert log.topics() == {}


def test_nobody_there(secured: Broker) -> None:
    client = settings_of(secured, "alice")
    for where, why in {
        "no-such-host.invalid:9092": "the name 'no-such-host.invalid' is not known",
        "127.0.0.1:1": "nothing listens on 127.0.0.1:1",
    }.items():
        text = refusal(KafkaLog(where, client=client, request_timeout_s=PATIENCE_S), topics, Unavailable)
        assert why in text
        assert "is log.bootstrap right, and the broker up?" in text


def consume(group: str, topic: str) -> Callable[[KafkaLog], object]:
    return lambda log: poll_some(log.consumer(group, [topic]), 1)


def write(identity: str, topic: str) -> Callable[[KafkaLog], object]:
    def call(log: KafkaLog) -> None:
        with log.producer(identity).transaction() as transaction:
            transaction.send(OutRecord(topic=topic, key=b"k", value=b"v"))

    return call


def read(topic: str) -> Callable[[KafkaLog], object]:
    def call(log: KafkaLog) -> object:
        reader = log.reader()
        reader.assign({TopicPartition(topic, 0): 0})
        return reader.poll(1, WAIT_S)

    return call


NEW = TopicSpec(name="new", partitions=1)
REFUSED = {
    "see a topic": ("alice", read("in"), "DESCRIBE on topic in"),
    "create a topic": (
        "bob",
        lambda log: log.create_topics([TopicSpec(name="new", partitions=1)]),
        "CREATE on topic new",
    ),
    "read a topic": ("bob", read("out"), "READ on topic out"),
    "consume a topic": ("bob", consume("bobs", "out"), "READ on topic out"),
    "join a group": ("bob", consume("admins", "in"), "READ on group admins"),
    "look at a group": ("bob", lambda log: log.committed("admins", "in"), "DESCRIBE on group admins"),
    "be a producer": ("bob", write("carol-0", "out"), "WRITE and DESCRIBE on transactional id carol-0"),
    "write to a read-only topic": ("bob", write("bob-0", "in"), "WRITE on topic in"),
    "delete a topic": ("bob", lambda log: log.delete_topic("in"), "DELETE on topic in"),
}


@pytest.mark.parametrize(("user", "call", "needs"), REFUSED.values(), ids=REFUSED.keys())
def test_a_permission_that_is_missing_is_named(
    secured: Broker, user: str, call: Callable[[KafkaLog], object], needs: str
) -> None:
    text = refusal(as_user(secured, user), call, ConfigError)
    assert f"not permitted: the user of log.client needs {needs}" in text


def test_offsets_of_a_group_without_its_permission(secured: Broker) -> None:
    def call(log: KafkaLog) -> None:
        theirs = log.consumer("bobs", ["in"])
        poll_some(theirs, 2)
        with log.producer("bob-1").transaction() as transaction:
            membership = theirs.membership()
            transaction.commit_offsets(type(membership)("admins", None), theirs.position())

    text = refusal(as_user(secured, "bob"), call, ConfigError)
    assert "READ on group admins" in text


def test_a_reader_needs_no_permission_on_any_group(secured: Broker) -> None:
    with closing(as_user(secured, "bob")) as log:
        assert sorted(read_values(log, "in")) == [b"1", b"2"]


@pytest.mark.slow
def test_a_password_that_is_changed_under_a_running_consumer_is_no_outage(tmp_path: Path) -> None:
    broker = Broker(tmp_path, port=0, security=Security(users={"alice": "first-word"}, mechanism="PLAIN"))
    with broker, closing(as_user(broker, "alice")) as admin:
        admin.create_topics([TopicSpec(name="in", partitions=1)])
        log = impatient(broker, "alice")
        consumer = log.consumer("g", ["in"])
        consumer.poll(1, 1.0)
        broker.stop()
        broker.security = Security(users={"alice": "second-word"}, mechanism="PLAIN")
        broker.start()

        def poll(_: KafkaLog) -> None:
            deadline = Deadline.after(WAIT_S, "the refusal")
            while True:
                deadline.check()
                consumer.poll(1, 0.2)

        text = refusal(log, poll, ConfigError)
        assert "does not accept the user 'alice' with this password" in text
