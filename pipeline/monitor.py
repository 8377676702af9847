"""``/healthz`` and ``/metrics`` of an operator's process.

``/healthz`` answers 503 when the operator has not finished a step for ``stalled_after_s``, so that Kubernetes or a load
balancer sees a stuck process. ``/metrics`` has the loop's numbers and whatever the operator registered with
prometheus-client.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.runner import Pulse
from laminar.schemas.errors import ConfigError

__all__ = ["Monitor", "serve"]


class _PulseCollector:
    def __init__(self, pulse: Pulse, instance: str) -> None:
        self._pulse, self._instance = pulse, instance

    def collect(self) -> Iterator[Metric]:
        """The loop's numbers, as Prometheus wants them."""
        pulse = self._pulse
        counters = {
            "laminar_steps": ("Steps of the operator that did something", pulse.steps),
            "laminar_idle_steps": ("Steps of the operator that found nothing to do", pulse.idle_steps),
            "laminar_step_seconds": ("Time inside steps", pulse.busy_s),
        }
        gauges = {
            "laminar_longest_step_seconds": ("Longest step so far", pulse.longest_step_s),
            "laminar_last_step_timestamp_seconds": ("When the newest step finished", pulse.last_step_at),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["instance"])
            counter.add_metric([self._instance], value)
            yield counter
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["instance"])
            gauge.add_metric([self._instance], value)
            yield gauge


class Monitor:
    """A running HTTP server."""

    def __init__(self, server: ThreadingHTTPServer, collector: _PulseCollector) -> None:
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


def serve(host: str, port: int, pulse: Pulse, instance: str, settings: MonitorConfig) -> Monitor:
    """Start serving. Raises ConfigError when the address cannot be bound."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(REGISTRY))
            elif self.path == "/healthz":
                silent_s = time.time() - pulse.last_step_at
                healthy = silent_s < settings.stalled_after_s
                body = {"instance": instance, "state": pulse.state, "last_step_s_ago": round(silent_s, 3)}
                self._answer(200 if healthy else 503, "application/json", json.dumps(body).encode())
            else:
                self._answer(404, "text/plain", b"valid: /healthz /metrics\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not worth a line."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"monitor.port: cannot listen on {host}:{port}: {error.strerror}") from None
    server.daemon_threads = True
    return Monitor(server, _PulseCollector(pulse, instance))
