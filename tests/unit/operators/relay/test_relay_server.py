from __future__ import annotations

import http.client
import json
import socket
from urllib.parse import urlsplit

import pytest

from laminar.operators.relay.client import RelayClient
from laminar.schemas.errors import ConfigError
from laminar.streams.deadline import Deadline
from tests.support.relays import RelayRun, soon


def limit() -> Deadline:
    return Deadline.after(10, "test")


def ask(url: str, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_health_needs_no_token_and_everything_else_does(run: RelayRun) -> None:
    relay = run.relay()
    url = relay.server.url
    status, body = ask(url, "/healthz")
    assert status == 200
    assert json.loads(body) == {"ok": True, "relay_id": "relay-0", "boot_id": relay.boot_id, "versions": []}
    for path, method in (("/v1/versions", "GET"), ("/v1/slots", "POST"), ("/v1/versions/x/data", "GET")):
        assert ask(url, path, method=method, body=b"{}")[0] == 401
        assert ask(url, path, method=method, body=b"{}", Authorization="Bearer guess")[0] == 401
    with pytest.raises(ConfigError, match="token"):
        RelayClient("relay-0", url, "guess").reserve(epoch=0, version=0, total_bytes=1, deadline=limit())


def test_only_verified_ranges_are_served(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    path = f"/v1/versions/{manifest.root_digest}/data"
    auth = f"Bearer {run.source().token}"
    status, body = ask(relay.server.url, path, Authorization=auth, Range="bytes=0-3")
    assert (status, len(body)) == (206, 4)
    for bad in (f"bytes=0-{manifest.total_bytes}", "bytes=9-3", f"bytes={1 << 60}-{1 << 61}"):
        assert ask(relay.server.url, path, Authorization=auth, Range=bad)[0] == 416
    assert ask(relay.server.url, "/v1/versions/00/data", Authorization=auth, Range="bytes=0-3")[0] == 404
    assert ask(relay.server.url, "/nothing", Authorization=auth)[0] == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"epoch": 1}', b'{"epoch": "x", "version": 1, "total_bytes": 2}'])
def test_a_malformed_request_is_answered_with_400_and_harms_nothing(run: RelayRun, body: bytes) -> None:
    relay = run.relay()
    auth = f"Bearer {run.source().token}"
    assert ask(relay.server.url, "/v1/slots", method="POST", body=body, Authorization=auth)[0] == 400
    run.publish(run.publisher(), 1)


def test_a_port_in_use_is_one_clear_line(run: RelayRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"relay\.port: cannot listen on 127\.0\.0\.1:{port}: Address already"):
            run.relay(port=port)


def test_connections_beyond_the_limit_are_told_so(run: RelayRun) -> None:
    relay = run.relay(max_connections=1)
    parts = urlsplit(relay.server.url)

    def status() -> int:
        try:
            return ask(relay.server.url, "/healthz")[0]
        except OSError:  # the refusal may overtake the request
            return 503

    with socket.create_connection((str(parts.hostname), parts.port or 0)):
        soon(lambda: status() == 503, "a second connection is refused")
    soon(lambda: status() == 200, "there is room again")


def test_a_peer_that_sends_nothing_does_not_hold_others(run: RelayRun) -> None:
    relay = run.relay()
    parts = urlsplit(relay.server.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0)) as silent:
        silent.sendall(b"GET /heal")
        assert ask(relay.server.url, "/healthz")[0] == 200
