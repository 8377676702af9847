"""What is found out about an address that is no Kafka broker, or not as it was configured."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from laminar.schemas.errors import LaminarError, Unavailable
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
