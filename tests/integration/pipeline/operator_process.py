"""An operator's process for tests: started, probed, scraped, waited for."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.pipeline.supervised import wait_until

__all__ = ["Process", "free_port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """``laminar operator ...`` or the supervisor's light entry, with its log."""

    def __init__(self, folder: Path, *command: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.port = port
        self._log = folder / f"{len(list(folder.iterdir()))}.err"
        with self._log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *command], stderr=out, stdin=subprocess.DEVNULL, env=env
            )

    def entries(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def messages(self) -> str:
        return "\n".join(entry["message"] for entry in self.entries())

    def wait_ready(self) -> None:
        wait_until(lambda: self.popen.poll() is not None or "is ready" in self.messages(), "ready", 60.0)
        assert self.popen.poll() is None, self._log.read_text()

    def wait(self) -> int:
        return self.popen.wait(timeout=60.0)

    def probe(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body of /livez, /readyz or /healthz."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def reasons(self) -> str:
        """Why it is not ready."""
        return "; ".join(self.probe("/readyz")[1]["reasons"])

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample by name and labels (without those that all have)."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            (
                sample.name,
                frozenset((k, v) for k, v in sample.labels.items() if k not in ("run", "operator", "replica")),
            ): (sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample; None: there is none."""
        return self.metrics().get((name, frozenset(labels.items())))

    def total(self, name: str) -> float:
        """Sum over all labels."""
        return sum(value for (found, _), value in self.metrics().items() if found == name)
