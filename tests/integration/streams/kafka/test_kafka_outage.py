"""S21: no broker for longer than a process is willing to wait."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.streams.broker import Broker
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240.0


def test_s21_processes_give_up_with_the_reason_and_the_run_goes_on_once_the_broker_is_back(tmp_path: Path) -> None:
    """Kafka's two minutes, scaled: processes give up after 4 s, and the broker is away until one has."""
    write_tiny_run(tmp_path)
    errors = tmp_path / "run.err"
    with Broker(tmp_path / "broker", port=0, session_timeout_s=3.0) as broker, errors.open("w") as stderr:
        settings = ["steps=8", "log.kind=kafka", f"log.bootstrap={broker.bootstrap}"]
        settings += ["log.request_timeout_s=4", "log.outage_s=4", "operators.reward.outage_s=4"]
        command = [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml", *settings]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            trained = tmp_path / "runs" / "tiny" / "logs" / "trainer-0.log"
            until(run, errors, lambda: trained.exists() and "step 1: version" in trained.read_text(), "step 1")
            broker.kill()
            until(run, errors, lambda: "exited with code 75" in errors.read_text(), "a process has given up")
            broker.start()
            code = run.wait(PATIENCE_S)
        finally:
            run.kill()
            run.wait()
    said = errors.read_text()
    assert code == 0, said[-4000:]
    (line, *_) = [line for line in said.splitlines() if "exited with code 75" in line]
    assert f"Kafka broker {broker.bootstrap}: " in line
    assert "no answer " in line
    assert "starting it again in " in line
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["restarts"] > 0
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["trained"] == 8 * 2 * 4


def until(run: subprocess.Popen[bytes], errors: Path, true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert run.poll() is None, f"{what}: the run ended\n{errors.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{what}: not in time\n{errors.read_text()[-4000:]}"
        time.sleep(0.1)
