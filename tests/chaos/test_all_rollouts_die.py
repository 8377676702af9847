"""A1 on the real broker: every rollout is killed whenever it is there, and the run says so and ends.

(That a run ends when nothing moves for ``no_progress_timeout_s`` is in tests/integration/pipeline/test_supervisor.py.)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.streams.broker import Broker
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


def rollouts(config: Path) -> Iterator[int]:
    """Processes of rollouts of this run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if words[2:4] == ["laminar.pipeline.process", "rollout"] and str(config) in words:
                yield int(entry.name)


def test_a1_without_rollouts_the_run_ends_and_names_topic_lag_and_last_heartbeat(
    tmp_path: Path, broker: Broker
) -> None:
    write_tiny_run(tmp_path)
    settings = ["log.kind=kafka", f"log.bootstrap={broker.bootstrap}", "name=a1", "steps=100000"]
    settings += ["supervisor.max_restarts_in_a_row=3", "operators.trainer.checkpoint.every=50"]
    command = [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml", *settings]
    config = tmp_path / "runs" / "a1" / "config.yaml"
    trainer_log = tmp_path / "runs" / "a1" / "logs" / "trainer-0.log"
    with (tmp_path / "out").open("w+") as out:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 400
            while not (trainer_log.exists() and "step 1: version" in trainer_log.read_text()):
                assert run.poll() is None, (tmp_path / "out").read_text()[-4000:]
                assert time.monotonic() < deadline, (tmp_path / "out").read_text()[-4000:]
                time.sleep(0.2)
            while run.poll() is None:
                assert time.monotonic() < deadline
                for pid in rollouts(config):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
        finally:
            run.kill()
            run.wait()
    said = (tmp_path / "out").read_text()
    assert run.returncode == 75, said[-4000:]
    ended = said.splitlines()[-1]
    assert re.fullmatch(
        r"error: rollout-[01] was killed by SIGKILL \(4 failures in a row\);"
        r" topic \S+ has a lag of \d+ \(group a1\.\w+\); last heartbeat of a rollout: rollout-[01], \d+ s ago",
        ended,
    ), ended
