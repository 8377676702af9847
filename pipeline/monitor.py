"""``/livez``, ``/readyz``, ``/healthz`` and ``/metrics`` of an operator's process.

* ``/livez``: 200 while the loop makes steps. 503: kill the process (or, before its first step, wait for it).
* ``/readyz``: 200 while the process is to be counted on. 503, with the reasons: something is wrong here or further on,
  or it was asked to stop. Killing it does not help.
* ``/healthz``: both in one.

The answers are JSON with the reasons. ``/metrics`` has what ``docs/metrics.md`` lists, and prometheus-client's numbers
of the process.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from laminar.pipeline.health import Health
from laminar.pipeline.metric import MetricCollector
from laminar.schemas.errors import ConfigError

__all__ = ["PATHS", "Monitor", "serve"]

PATHS = ("/livez", "/readyz", "/healthz", "/metrics")
_CLIENT_TIMEOUT_S = 10.0
"""A client that does not say what it wants for so long is hung up on."""


class Monitor:
    """A running HTTP server."""

    def __init__(self, server: ThreadingHTTPServer, collector: MetricCollector) -> None:
        self._server, self._collector = server, collector
        REGISTRY.register(collector)
        self._thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="monitor", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        REGISTRY.unregister(self._collector)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)


def serve(host: str, port: int, instance: str, health: Health, collector: MetricCollector) -> Monitor:
    """Start serving. Raises ConfigError when the address cannot be bound."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(REGISTRY))
            elif path == "/livez":
                self._verdict(health.not_live())
            elif path == "/readyz":
                self._verdict(health.not_ready())
            elif path == "/healthz":
                self._verdict(list(dict.fromkeys(health.not_live() + health.not_ready())))
            else:
                self._answer(404, "text/plain", f"valid: {' '.join(PATHS)}\n".encode())

        def _verdict(self, reasons: list[str]) -> None:
            body = {
                "ok": not reasons,
                "instance": instance,
                "state": health.pulse.state,
                "last_step_s_ago": round(health.pulse.silent_s(health.clock()), 3),
                "reasons": reasons,
            }
            self._answer(503 if reasons else 200, "application/json", json.dumps(body).encode() + b"\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not worth a line."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up is not worth a traceback."""

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"monitor.port: cannot listen on {host}:{port}: {error.strerror}") from None
    return Monitor(server, collector)
