"""The quickstart with vLLM: it learns as it does with the torch engine, also when a rollout dies on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.pipeline.examples import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
_STEP = re.compile(r"step (\d+): version")


def _pid(folder: Path, name: str, index: str) -> int | None:
    words = ["laminar.pipeline.process", name, index, str(folder / "config.yaml")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if all(word in said for word in words):
            return int(process.name)
    return None


def test_a6_the_quickstart_learns_with_vllm_though_a_rollout_is_killed_mid_generation(tmp_path: Path) -> None:
    write("sortl", tmp_path / "examples" / "sortl")
    folder = tmp_path / "runs" / "vllm"
    settings = ["name=vllm", "operators.rollout.engine.kind=vllm"]
    command = [sys.executable, "-m", "laminar.pipeline.cli", "run", str(QUICKSTART), *settings]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        log = folder / "logs" / "trainer-0.log"
        while not (log.exists() and max(map(int, _STEP.findall(log.read_text())), default=0) >= 10):
            assert run.poll() is None, (tmp_path / "out").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        victim = _pid(folder, "rollout", "0")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        code = run.wait(timeout=600)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=60)
    said = (tmp_path / "out").read_text()[-4000:]
    assert code == 0, said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (80, 1), said
    assert summary["accuracy_after"] > 0.7, said
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["in_flight"] == 0
    assert summary["max_versions_per_trajectory"] == 1
