"""What the README promises about ``configs/quickstart.yaml``, with every operator killed once on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

OPERATORS = ("rollout-0", "relay-0", "reward-0", "repack-0", "prompts-0", "trainer-0", "rollout-1")
"""In the order in which they are killed."""
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
LIMIT_S = 1200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("quickstart")
    subprocess.run(
        [sys.executable, "-m", "laminar.pipeline.cli", "example", "sortl", "examples/sortl"],
        cwd=made, check=True, capture_output=True,
    )  # fmt: skip
    return made


def log_of(folder: Path, instance: str) -> str:
    path = folder / "runs" / "quickstart" / "logs" / f"{instance}.log"
    return path.read_text() if path.exists() else ""


def pid_of(folder: Path, instance: str) -> int | None:
    name, _, index = instance.rpartition("-")
    wanted = ["laminar.pipeline.process", name, index, str(folder / "runs" / "quickstart" / "config.yaml")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if words[2:6] == wanted:
                return int(entry.name)
    return None


def test_b1_the_quickstart_learns_although_each_operator_is_killed_once(folder: Path) -> None:
    command = [sys.executable, "-m", "laminar.pipeline.cli", "run", str(QUICKSTART)]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_S
    killed: list[str] = []
    try:
        for number, instance in enumerate(OPERATORS):
            while f"step {5 + 8 * number}: version" not in log_of(folder, "trainer-0"):
                assert time.monotonic() < deadline
                assert run.poll() is None, run.communicate()[1][-4000:]
                time.sleep(0.05)
            pid = pid_of(folder, instance)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(instance)
        out, err = run.communicate(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        run.kill()
    assert run.returncode == 0, err[-4000:]
    assert killed == list(OPERATORS)
    summary = json.loads((folder / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.35
    assert summary["accuracy_after"] > 0.70
    assert summary["restarts"] >= len(OPERATORS)
    assert summary["moves"] + summary["adoptions"] > 0
    assert summary["max_versions_per_trajectory"] == 1
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["dead"] == 0
    assert "balanced" in out
