"""The quickstart itself, as ``make quickstart`` runs it: undisturbed, on Kafka, and with every process killed once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.pipeline.examples import write
from laminar.streams.broker import Broker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
INSTANCES = ("rollout-0", "relay-0", "reward-0", "repack-0", "prompts-0", "trainer-0", "rollout-1")
"""In the order in which they are killed."""
_STEP = re.compile(r"step (\d+): version")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the example where the run file expects it."""
    made = tmp_path_factory.mktemp("quickstart")
    write("sortl", made / "examples" / "sortl")
    return made


class Run:
    """One ``laminar run`` of the quickstart."""

    def __init__(self, folder: Path, name: str, *settings: str) -> None:
        self.folder = folder / "runs" / name
        self._out = (folder / f"{name}.out").open("w+")
        command = [sys.executable, "-m", "laminar.pipeline.cli", "run", str(QUICKSTART), f"name={name}", *settings]
        self._process = subprocess.Popen(command, cwd=folder, stdout=self._out, stderr=subprocess.STDOUT, text=True)

    def steps(self) -> int:
        """Optimizer steps so far."""
        log = self.folder / "logs" / "trainer-0.log"
        found = _STEP.findall(log.read_text()) if log.exists() else []
        return max(map(int, found), default=0)

    def until_step(self, step: int) -> None:
        """Wait until the trainer made this step."""
        deadline = time.monotonic() + 300
        while self.steps() < step:
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, f"step {step} is not reached\n{self.output()}"
            time.sleep(0.1)

    def kill(self, instance: str) -> None:
        """kill -9 of a process; it is waited for, should it be starting again."""
        name, _, index = instance.rpartition("-")
        words = ["laminar.pipeline.process", name, index, str(self.folder / "config.yaml")]
        deadline = time.monotonic() + 60
        while not (found := list(_processes(words))):
            assert time.monotonic() < deadline, f"no process of {instance} is there\n{self.output()}"
            time.sleep(0.1)
        os.kill(found[0], signal.SIGKILL)

    def output(self) -> str:
        """The end of what it printed."""
        self._out.flush()
        return Path(self._out.name).read_text()[-6000:]

    def summary(self) -> dict[str, Any]:
        """Wait for the end and return ``summary.json``."""
        try:
            code = self._process.wait(timeout=600)
        finally:
            self._process.kill()
            self._out.close()
        assert code == 0, self.output_of_closed()
        made: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return made

    def output_of_closed(self) -> str:
        """The end of what it printed, after the end."""
        return Path(self._out.name).read_text()[-6000:]


def _processes(words: list[str]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if arguments[2:6] == words:
                yield int(entry.name)


def check(summary: dict[str, Any]) -> None:
    """What holds for each of these runs, disturbed or not."""
    assert summary["accuracy_before"] < 0.35
    assert summary["accuracy_after"] > 0.70
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert summary["max_versions_per_trajectory"] == 1
    assert summary["exit_reason"].startswith("all ")


def test_the_quickstart_learns_and_repack_moves_trajectories(folder: Path) -> None:
    summary = Run(folder, "quickstart").summary()
    check(summary)
    assert summary["moves"] > 0
    assert summary["restarts"] == 0
    assert summary["ledger"]["dead"] == 0


@pytest.mark.kafka
def test_the_same_run_learns_on_kafka(folder: Path, tmp_path: Path) -> None:
    with Broker(tmp_path / "broker", port=0) as broker:
        check(Run(folder, "kafka", "log.kind=kafka", f"log.bootstrap={broker.bootstrap}").summary())


def test_b1_kill_9_of_each_process_in_turn_costs_neither_a_sample_nor_the_accuracy(folder: Path) -> None:
    run = Run(folder, "killed")
    for number, instance in enumerate(INSTANCES):
        run.until_step(4 + 7 * number)
        run.kill(instance)
    summary = run.summary()
    check(summary)
    assert summary["restarts"] >= len(INSTANCES)
    assert summary["ledger"]["dead"] == 0
