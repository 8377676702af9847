"""What is found out about an address that is no Kafka broker, or not as it was configured."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from laminar.schemas.errors import ConfigError, LaminarError, Unavailable
from laminar.streams.broker.certificate import Authority
from laminar.streams.kafka.probe import host_and_port, look
from laminar.streams.kafka.refusal import cannot_connect


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that treats every connection so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def hang_up(connection: socket.socket) -> None:
    connection.settimeout(0.2)


def speak_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def told(address: str, client: dict[str, str]) -> LaminarError | None:
    return cannot_connect(address, client, "list topics", 1.0)


@pytest.mark.parametrize("answer", [hang_up, speak_http])
@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_SSL"])
def test_what_only_looks_like_a_wrong_setting_is_an_outage(
    answer: Callable[[socket.socket], None], protocol: str
) -> None:
    """As a load balancer hangs up whose brokers are away: somebody has to try again."""
    with server(answer) as address:
        assert not look(address, {}).kafka
        error = told(address, {"security.protocol": protocol})
    assert type(error) is Unavailable
    assert f"{address} takes connections but does not answer as a Kafka broker does" in str(error)


def test_the_first_address_that_takes_a_connection_counts() -> None:
    with server(hang_up) as address:
        assert f"{address} takes connections" in str(told(f"127.0.0.1:1,{address}", {}))
    assert "nothing listens on 127.0.0.1:1" in str(told("127.0.0.1:1", {}))


def test_host_and_port() -> None:
    assert host_and_port("[::1]:9092") == ("::1", 9092)
    assert host_and_port(" broker.example:1 ") == ("broker.example", 1)


def answer_as_kafka(connection: socket.socket, mechanisms: bytes = b"") -> None:
    """ApiVersions has an answer; SaslHandshake the given one."""
    with suppress(OSError, struct.error):
        for body in (b"\0" * 6, mechanisms):
            (size,) = struct.unpack(">i", connection.recv(4))
            connection.recv(size)
            connection.sendall(struct.pack(">ii", 4 + len(body), 1) + body)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@contextmanager
def by_tls(authority: Authority, *, asks: bool = False) -> Iterator[str]:
    """A broker behind TLS; one that asks hangs up on a client without a certificate."""
    issued = authority.issue("broker", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.chain, issued.key)
    if asks:
        context.load_verify_locations(authority.trust)
        context.verify_mode = ssl.CERT_REQUIRED

    def serve(connection: socket.socket) -> None:
        connection.settimeout(5)
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
            answer_as_kafka(secured)

    with server(serve) as address:
        yield address


@pytest.mark.parametrize(
    "settings",
    [
        {"ssl.ca.pem": "a certificate"},
        {"enable.ssl.certificate.verification": "false"},
        {"enable.ssl.certificate.verification": False},
    ],
)
def test_an_authority_that_only_librdkafka_can_load_is_not_called_wrong(
    authority: Authority, settings: dict[str, str]
) -> None:
    with by_tls(authority) as address:
        assert "is not accepted" in str(told(address, {"security.protocol": "SSL"}))
        assert told(address, {"security.protocol": "SSL"} | settings) is None


def test_a_certificate_that_only_librdkafka_can_load_is_not_called_missing(authority: Authority) -> None:
    settings = {"security.protocol": "SSL", "ssl.ca.location": str(authority.trust)}
    with by_tls(authority, asks=True) as address:
        assert type(told(address, settings)) is ConfigError
        assert type(told(address, settings | {"ssl.keystore.location": "client.p12"})) is Unavailable


def test_a_list_of_mechanisms_that_ends_too_early_is_none() -> None:
    with server(lambda connection: answer_as_kafka(connection, struct.pack(">hih", 0, 9, 5) + b"PLAIN")) as address:
        found = look(address, {})
    assert (found.kafka, found.sasl) == (True, None)
