"""The relay's HTTP side: stdlib ``http.server``, a thread per connection, bodies by ``sendfile``.

A relay answers few requests with large bodies: a 64 MiB range costs the kernel's copy and a fraction of a millisecond
of Python, so a framework would add start-up time and nothing else. Keep-alive, a time limit on every socket call, at
most ``max_connections`` at once. Everything but ``/healthz`` needs ``Authorization: Bearer TOKEN``.

=========================================  =======================================================================
GET  /healthz                              ``{"ok", "relay_id", "boot_id", "versions"}``
GET  /v1/versions                          what is held: version, epoch, verified chunks, chunks
GET  /v1/versions/ROOT?above=N&wait_s=S    verified chunks of the version with this root digest; waits for more than N
GET  /v1/versions/ROOT/data?wait_s=S       bytes by ``Range``, of verified chunks only; each is waited for up to S
POST /v1/slots                             ``{"epoch", "version", "total_bytes"}``: reserve a slot
POST /v1/slots/INDEX/seal                  ``{"nonce", "manifest"}``: verify, then let readers in
=========================================  =======================================================================

Errors are ``{"error": class name, "message"}``. A request that names another boot id than ours is refused with 409.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from laminar.operators.relay.client import BOOT_HEADER
from laminar.operators.relay.manifest import from_json
from laminar.operators.relay.store import SlotStore
from laminar.schemas.errors import ConfigError, Fenced, LaminarError, Unavailable, WeightsMismatch

__all__ = ["RelayServer"]

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 256 * 1024 * 1024
_MAX_WAIT_S = 30.0
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_STATUS: Mapping[type[LaminarError], HTTPStatus] = {
    ConfigError: HTTPStatus.INSUFFICIENT_STORAGE,
    Fenced: HTTPStatus.CONFLICT,
    WeightsMismatch: HTTPStatus.UNPROCESSABLE_ENTITY,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}


def _seconds(query: Mapping[str, list[str]]) -> float:
    """``wait_s`` of a query, within bounds; 0 when it is none."""
    try:
        return min(_MAX_WAIT_S, max(0.0, float(query["wait_s"][0])))
    except (KeyError, ValueError):
        return 0.0


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    relay: RelayServer

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A peer that goes away mid-answer is ordinary."""
        _log.debug("connection of %s ended", client_address, exc_info=True)


class RelayServer:
    """Serves one store. ``start`` returns at once; ``close`` stops accepting."""

    def __init__(
        self,
        store: SlotStore,
        *,
        relay_id: str,
        boot_id: str,
        token: str,
        host: str,
        port: int,
        advertise: str = "",
        chunk_bytes: int,
        max_connections: int = 64,
        read_timeout_s: float = 10.0,
    ) -> None:
        """Raises ConfigError when the address cannot be had."""
        self.store = store
        self.relay_id = relay_id
        self.boot_id = boot_id
        self.chunk_bytes = chunk_bytes
        self.token = token
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.connections = threading.BoundedSemaphore(max_connections)
        handler = type("_BoundHandler", (_Handler,), {"timeout": read_timeout_s + _MAX_WAIT_S})
        try:
            self._http = _HTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(f"relay.port: cannot listen on {host}:{port}: {reason}") from error
        self._http.relay = self
        name = advertise or (socket.gethostname() if host in ("", "0.0.0.0", "::") else host)  # noqa: S104
        self.url = f"http://{name}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="relay-http", daemon=True)

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and cut what is open."""
        if self._thread.is_alive():
            self._http.shutdown()
        self._http.server_close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def open_connection(self, connection: socket.socket) -> Iterator[None]:
        """Remember a connection while it is served."""
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HTTPServer
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with self.server.relay.open_connection(self.connection):
            self._handle()

    def _handle(self) -> None:
        if not self.server.relay.connections.acquire(blocking=False):
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            self.close_connection = True
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "Unavailable", "message": "too many connections"})
            return
        try:
            super().handle()
        except (OSError, TimeoutError):
            self.close_connection = True
        finally:
            self.server.relay.connections.release()

    def do_GET(self) -> None:
        relay = self.server.relay
        url = urlsplit(self.path)
        if url.path == "/healthz":
            self._answer(
                HTTPStatus.OK,
                {"ok": True, "relay_id": relay.relay_id, "boot_id": relay.boot_id, "versions": self._held()},
            )
            return
        if not self._admitted():
            return
        parts = url.path.strip("/").split("/")
        if parts == ["v1", "versions"]:
            self._answer(HTTPStatus.OK, {"versions": self._held()})
        elif parts[:2] == ["v1", "versions"] and len(parts) == 3:
            self._progress(parts[2], parse_qs(url.query))
        elif parts[:2] == ["v1", "versions"] and len(parts) == 4 and parts[3] == "data":
            self._data(parts[2], parse_qs(url.query))
        else:
            self._missing(f"no such path: {url.path}")

    def do_POST(self) -> None:
        if not self._admitted():
            return
        relay = self.server.relay
        parts = urlsplit(self.path).path.strip("/").split("/")
        try:
            body = self._body()
            if parts == ["v1", "slots"]:
                got = relay.store.reserve(
                    epoch=int(body["epoch"]), version=int(body["version"]), total_bytes=int(body["total_bytes"])
                )
                answer = {"slot": got.index, "nonce": got.nonce, "path": str(got.path)}
                answer["chunk_bytes"] = relay.chunk_bytes
            elif parts[:2] == ["v1", "slots"] and len(parts) == 4 and parts[3] == "seal":
                relay.store.seal(int(parts[2]), str(body["nonce"]), from_json(body["manifest"]))
                answer = {}
            else:
                self._missing(f"no such path: {self.path}")
                return
        except LaminarError as error:
            kind = next((k for k in _STATUS if isinstance(error, k)), Unavailable)
            self._answer(_STATUS[kind], {"error": kind.__name__, "message": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            self.close_connection = True
            self._answer(HTTPStatus.BAD_REQUEST, {"error": "Unavailable", "message": f"bad request: {error!r}"})
        else:
            identity = {"relay_id": relay.relay_id, "boot_id": relay.boot_id, "url": relay.url}
            self._answer(HTTPStatus.OK, {**answer, **identity})

    def _progress(self, root_digest: str, query: Mapping[str, list[str]]) -> None:
        above = int(query["above"][0]) if query.get("above", [""])[0].isdecimal() else -1
        progress = self.server.relay.store.progress(root_digest, above=above, wait_s=_seconds(query))
        if progress is None:
            self._missing(f"no version with root digest {root_digest} here")
        else:
            self._answer(HTTPStatus.OK, {"verified": progress.verified, "n_chunks": progress.n_chunks})

    def _data(self, root_digest: str, query: Mapping[str, list[str]]) -> None:
        """Send a range; with ``wait_s``, also of chunks that are verified only while it is being sent."""
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        wait_s = _seconds(query)
        store = self.server.relay.store
        try:
            store.progress(root_digest, above=0, wait_s=wait_s)
            opened = store.open(root_digest)
        except Unavailable:
            opened = None
        if opened is None:
            self._missing(f"no version with root digest {root_digest} here")
            return
        with opened.lease:
            start = int(wanted[1]) if wanted else 0
            verified = opened.verified(above=start, wait_s=wait_s)
            stop = int(wanted[2]) + 1 if wanted else verified
            if not (start < verified and start < stop <= (opened.total_bytes if wait_s else verified)):
                message = f"bytes {start}-{stop - 1} are not verified here yet ({verified} are)"
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"error": "Unavailable", "message": message})
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{opened.total_bytes}")
            self.end_headers()
            with open(opened.lease.fd, "rb", buffering=0, closefd=False) as file:
                while start < stop:
                    if verified <= start:
                        self.close_connection = True  # it was abandoned or stalls: the peer sees the early end
                        return
                    self.connection.sendfile(file, start, min(stop, verified) - start)
                    start = min(stop, verified)
                    verified = opened.verified(above=start, wait_s=wait_s) if start < stop else stop

    def _admitted(self) -> bool:
        """Check token and boot id; answers when they are wrong."""
        relay = self.server.relay
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {relay.token}".encode()):
            self.close_connection = True
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "ConfigError", "message": "wrong or missing token"})
            return False
        boot = self.headers.get(BOOT_HEADER, relay.boot_id)
        if boot != relay.boot_id:
            self.close_connection = True
            message = f"this is boot {relay.boot_id}, not {boot}: the relay restarted"
            self._answer(HTTPStatus.CONFLICT, {"error": "Unavailable", "message": message})
            return False
        return True

    def _body(self) -> dict[str, Any]:
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 < size <= _MAX_BODY_BYTES:
            raise ValueError(f"a body of {size} bytes")
        body = json.loads(self.rfile.read(size))
        if not isinstance(body, dict):
            raise TypeError("the body is not a JSON object")
        return body

    def _held(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(v) for v in self.server.relay.store.held()]

    def _missing(self, message: str) -> None:
        self._answer(HTTPStatus.NOT_FOUND, {"error": "Unavailable", "message": message})

    def _answer(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s %s", self.address_string(), format % args)
