"""``laminar run`` with every operator as a process of its own, on a tiny model that learns nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny_run(made)
    return made


def laminar(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laminar.pipeline.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    out = laminar(folder, "read", "runs/tiny", "training.steps").stdout
    return [json.loads(line) for line in out.splitlines()]


def test_a_run_ends_by_itself_and_resumes_where_it_ended(folder: Path) -> None:
    first = laminar(folder, "run", "run.yaml")
    assert first.returncode == 0, first.stderr[-4000:]
    summary = json.loads((folder / "runs" / "tiny" / "summary.json").read_text())
    assert summary["exit_reason"] == "all 3 steps are done"
    assert summary["steps"] == 3
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary["ledger"]["trained"] == 3 * 2 * 4
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["dropped"] == {"eval": 8}
    assert summary["max_versions_per_trajectory"] == 1
    assert "Finished: all 3 steps are done" in first.stdout
    logs = {path.stem for path in (folder / "runs" / "tiny" / "logs").iterdir()}
    assert logs == {"prompts-0", "rollout-0", "rollout-1", "reward-0", "repack-0", "relay-0", "trainer-0"}

    second = laminar(folder, "run", "run.yaml", "steps=5")
    assert second.returncode == 0, second.stderr[-4000:]
    records = [line["record"] | {"type": line["type"]} for line in steps_of(folder)]
    assert [record["step"] for record in records if record["type"] == "TrainingStep"] == [1, 2, 3, 4, 5]
    trained = Counter(one for record in records for one in record.get("trained", ()))
    assert max(trained.values()) == 1
    assert laminar(folder, "audit", "runs/tiny").returncode == 0


def test_a_run_whose_weights_change_in_flight_balances_also_when_it_goes_on_pinned(folder: Path) -> None:
    slow = ("operators.rollout.engine.max_running=1", "operators.rollout.engine.steps_per_poll=1")
    how = ("name=flown", "operators.rollout.replicas=1", "operators.prompts.sampling.max_tokens=26", *slow)
    # One after the other, and always one: sampling takes longer than training, so new weights come in its middle.
    flying = (
        "operators.rollout.updates=in_flight",
        "operators.rollout.max_in_flight=16",
        "operators.rollout.top_up_lag=50",
    )
    first = laminar(folder, "run", "run.yaml", *how, "steps=12", *flying)
    assert first.returncode == 0, first.stderr[-4000:]
    summary = json.loads((folder / "runs" / "flown" / "summary.json").read_text())
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["trained"] == 12 * 2 * 4
    assert summary["max_versions_per_trajectory"] > 1
    audit = laminar(folder, "audit", "runs/flown")
    assert "in the mean" in audit.stdout
    second = laminar(folder, "run", "run.yaml", *how, "steps=14")
    assert second.returncode == 0, second.stderr[-4000:]
    assert laminar(folder, "audit", "runs/flown").returncode == 0
    finished = laminar(folder, "read", "runs/flown", "trajectories.completed").stdout.splitlines()
    modes = {True: set(), False: set()}
    for line in finished:
        record = json.loads(line)["record"]
        modes[record["version_min"] == record["version_max"]].add(record["updates"])
    assert modes == {True: {"pinned", "in_flight"}, False: {"in_flight"}}


def test_a2_with_one_epoch_the_run_ends_when_the_data_does(folder: Path) -> None:
    done = laminar(
        folder,
        "run",
        "run.yaml",
        "name=once",
        "steps=50",
        "operators.prompts.epochs=1",
        "operators.prompts.train.limit=7",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((folder / "runs" / "once" / "summary.json").read_text())
    assert summary["exit_reason"].startswith("data exhausted at step 4")
    assert summary["ledger"]["balanced"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["operators.prompts.train.path=none.jsonl"], 2, "none.jsonl"),
        (["operators.prompts.train.answer_field=label"], 2, "train.jsonl:1"),
        (["operators.reward.function=scoring:nothing"], 2, "nothing"),
    ],
)
def test_what_an_operator_refuses_ends_the_run_with_one_line(
    folder: Path, arguments: list[str], code: int, words: str
) -> None:
    done = laminar(folder, "run", "run.yaml", f"run_dir=runs/refused-{abs(hash(words))}", *arguments)
    assert done.returncode == code, done.stderr[-4000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in done.stderr


def test_b18_sigterm_in_the_middle_leaves_nothing_and_the_next_start_finishes(folder: Path) -> None:
    command = [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml", "name=stopped", "steps=90"]
    run = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    steps_log = folder / "runs" / "stopped" / "logs" / "trainer-0.log"
    deadline = time.monotonic() + 300
    while not (steps_log.exists() and "step 2: version" in steps_log.read_text()):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.1)
    for _ in range(3):
        os.kill(run.pid, signal.SIGTERM)
        time.sleep(0.2)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, said[-4000:]
    assert processes_of("runs/stopped/config.yaml") == []
    again = laminar(folder, "run", "run.yaml", "name=stopped", "steps=90")
    assert again.returncode == 0, again.stderr[-4000:]
    assert laminar(folder, "audit", "runs/stopped").returncode == 0
    finished = laminar(folder, "read", "runs/stopped", "trajectories.completed").stdout.splitlines()
    generated = Counter(json.loads(line)["record"]["trajectory_id"] for line in finished)
    assert len(generated) == 90 * 2 * 4 + 8
    assert max(generated.values()) == 1, "nothing is generated twice"


def processes_of(words: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if words in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.kafka
def test_the_same_run_on_kafka_by_one_changed_key(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laminar.pipeline.cli", "broker", str(tmp_path), "--port", "0"]
    broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert broker.stdout is not None
        bootstrap = broker.stdout.readline().split()[3].rstrip(",")
        on_kafka = ("name=brokered", "log.kind=kafka", f"log.bootstrap={bootstrap}")
        done = laminar(folder, "run", "run.yaml", *on_kafka)
        assert done.returncode == 0, done.stderr[-4000:]
        summary = json.loads((folder / "runs" / "brokered" / "summary.json").read_text())
        assert summary["ledger"]["trained"] == 3 * 2 * 4
        assert summary["ledger"]["balanced"]
        assert laminar(folder, "audit", "runs/brokered").returncode == 0
        lag = json.loads(laminar(folder, "lag", "runs/brokered", "--json").stdout)
        assert sum(row["lag"] for row in lag if row["group"] == "brokered.reward") == 0
        again = laminar(folder, "run", "run.yaml", *on_kafka, "run_dir=runs/elsewhere")
        assert again.returncode == 70
        assert "is a new folder" in again.stderr
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.communicate(timeout=60)
    assert broker.returncode == 0
