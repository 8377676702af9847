"""A gate in front of a web service, as clusters have it: a login, TLS, and a list of who asked what."""

from __future__ import annotations

import base64
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["Gate", "gate"]


@dataclass
class Gate:
    """An open gate."""

    url: str
    login: str | None = None
    """``user:password``, or nobody is asked."""
    status: int | None = None
    """Answer this to everything, without asking the service."""
    requests: list[str] = field(default_factory=list)
    """``METHOD /path`` of each."""


@contextmanager
def gate(
    service: str, *, login: str | None = None, key: Path | None = None, chain: Path | None = None
) -> Iterator[Gate]:
    """Pass on to ``service`` what may pass; over TLS with ``key`` and ``chain``."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    scheme = "http"
    if key is not None and chain is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(chain, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    opened = Gate(f"{scheme}://127.0.0.1:{server.server_address[1]}", login)
    handler.gate, handler.service = opened, service  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield opened
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    gate: Gate
    service: str

    def do_GET(self) -> None:
        self._pass_on()

    do_POST = do_PUT = do_GET

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.gate.requests.append(f"{self.command} {self.path}")
        if self.gate.status is not None:
            self._answer(self.gate.status, b"{}")
        elif self.gate.login is not None and self.headers.get("Authorization") != _basic(self.gate.login):
            self._answer(401, b'{"error_code": 401, "message": "Unauthorized"}')
        else:
            headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
            request = urllib.request.Request(self.service + self.path, body or None, headers, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    self._answer(answer.status, answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    self._answer(error.code, error.read())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"
