"""A whole run whose engines, each in a process of its own, are killed while they sample, and what must hold then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.repack.fold import POOL
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.log import Log
from laminar.streams.open import SqliteLogConfig, open_log
from laminar.streams.reading import Tail, decoded
from tests.support.lives import read_lives

__all__ = ["check_run", "run_and_kill", "write_run"]

GROUP = 2 * 8
"""Trajectories of a step."""

RUN_FILE = """\
name: kills
steps: {steps}
groups_per_step: 2
group_size: 8
max_staleness: null
model: {{path: model}}
operators:
  prompts:
    train: {{path: train.jsonl}}
    sampling: {{max_tokens: 160}}
  rollout: {{replicas: 2, engine: {engine}, heartbeat_s: 0.1, delta_s: 0.1}}
  reward: {{function: "scoring:length"}}
  repack: {{period_s: 0.5, max_owner_deaths: 20}}
  relay: {{}}
  trainer: {{optimizer: {{lr: 1.0e-5}}, algorithm: {{zero_advantage: keep}}, checkpoint: {{every: 10}}}}
supervisor: {{no_progress_timeout_s: 900}}
"""
"""Rollouts are killed every few seconds here, and what was merely waiting is not to be taken for the cause."""


def write_run(folder: Path, engine: str, *, steps: int) -> None:
    """Model (of a shape that vLLM serves too; responses of 100 tokens and more), prompts, reward and ``run.yaml``."""
    symbols = [chr(0x4E00 + i) for i in range(250)]
    tokenizer = symbol_tokenizer(symbols, separator="", max_length=192)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=192, tie_word_embeddings=True, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    rows = [{"prompt": a + b, "answer": a} for a in symbols[:40] for b in symbols[:40]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "scoring.py").write_text("def length(trajectory):\n    return len(trajectory.text) / 100\n")
    (folder / "run.yaml").write_text(RUN_FILE.format(engine=engine, steps=steps))


class _Follower:
    """What a run's log says, as it comes."""

    def __init__(self, log: Log) -> None:
        self._codec = Codec()
        self._tails = {
            topic: Tail(log, [topic])
            for topic in ("rollouts.status", "trajectories.partial", "trajectories.completed", "training.steps")
        }
        self.seen: dict[str, list[Any]] = {topic: [] for topic in self._tails}

    def poll(self) -> None:
        for topic, tail in self._tails.items():
            while records := tail.poll(1000):
                self.seen[topic] += [event for _, event in decoded(records, self._codec)]

    @property
    def steps(self) -> int:
        return sum(isinstance(one, r.TrainingStep) for one in self.seen["training.steps"])

    def status(self, rollout: str) -> r.RolloutStatus | None:
        told = [one for one in self.seen["rollouts.status"] if one.rollout_id == rollout]
        return told[-1] if told else None

    def interrupted(self, rollout: str) -> int:
        """Of how many losses of its engine this rollout had something in it."""
        moves = [one for one in self.seen["trajectories.partial"] if isinstance(one, r.TrajectoryMoved)]
        return len({one.at_ms for one in moves if one.reason == "lost" and one.from_rollout == rollout})


def _words(pid: int | str) -> list[str]:
    """A process's command line; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def _rollout(instance: str, config: Path) -> int | None:
    """The process of a rollout."""
    wanted = {"laminar.pipeline.process", *instance.split("-"), str(config)}
    found = [int(one.name) for one in Path("/proc").glob("[0-9]*") if wanted <= set(_words(one.name))]
    return found[0] if found else None


def _engine(rollout: int) -> int | None:
    """The process of its engine."""
    for task in Path(f"/proc/{rollout}/task").glob("*/children"):
        for pid in task.read_text().split():
            if "laminar.operators.rollout.engines.remote.bond" in _words(pid):
                return int(pid)
    return None


def _wait(told: _Follower, victim: str, losses: int, deadline: float) -> None:
    """Until the rollout says that it lost its engine once more."""
    while (status := told.status(victim)) is None or status.engine_losses == losses:
        assert time.monotonic() < deadline, f"{victim} never noticed that its engine was killed"
        time.sleep(0.03)
        told.poll()


def run_and_kill(folder: Path, *, kills: int, timeout_s: float) -> tuple[int, str, _Follower, int]:
    """``laminar run``, whose engines are killed until ``kills`` of the losses were in the middle of a generation.

    Exit code, what it said, what the log says, and how many engines were killed in all.
    """
    run_dir = folder / "runs" / "kills"
    with (folder / "out").open("w") as out:
        command = [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml"]
        run = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

    def said() -> str:
        return (folder / "out").read_text()[-6000:]

    deadline = time.monotonic() + timeout_s
    killed = 0
    try:
        while not (run_dir / "logs" / "trainer-0.log").exists():
            assert run.poll() is None, said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.1)
        with closing(open_log(SqliteLogConfig(path=run_dir / "log"), run_id="kills")) as log:
            told = _Follower(log)
            victims = ["rollout-0", "rollout-1"]
            processes: dict[str, int] = {}
            while (done := sum(told.interrupted(one) for one in victims)) < kills:
                assert run.poll() is None, said()
                assert time.monotonic() < deadline, said()
                time.sleep(0.03)
                told.poll()
                for victim in victims:
                    status = told.status(victim)
                    fresh = status is not None and time.time() - status.at_ms / 1000 < 0.5
                    if status is None or not fresh or not status.running or told.steps < done:
                        continue
                    pid = _engine(processes.setdefault(victim, _rollout(victim, run_dir / "config.yaml") or 0))
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                    _wait(told, victim, status.engine_losses, deadline)
                    victims.reverse()
                    break
            code = run.wait(timeout=max(1.0, deadline - time.monotonic()))
            told.poll()
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=120)
    return code, said(), told, killed


def check_run(folder: Path, code: int, said: str, told: _Follower, *, killed: int) -> dict[str, Any]:
    """Balanced, every trajectory's fate once, no token lost or twice, and no operator's process ended; the summary."""
    assert code == 0, said
    summary: dict[str, Any] = json.loads((folder / "runs" / "kills" / "summary.json").read_text())
    assert summary["restarts"] == 0, said
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["trained"] == summary["steps"] * GROUP
    assert summary["ledger"]["dead"] == 0
    assert summary["ledger"]["in_flight"] == 0
    assert summary["max_versions_per_trajectory"] == 1
    audit = subprocess.run(
        [sys.executable, "-m", "laminar.pipeline.cli", "audit", "runs/kills"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr

    beats: list[r.RolloutStatus] = told.seen["rollouts.status"]
    for rollout in ("rollout-0", "rollout-1"):
        mine = [one for one in beats if one.rollout_id == rollout]
        assert len({one.incarnation for one in mine}) == 1
        assert [one.engine_losses for one in mine] == sorted(one.engine_losses for one in mine)
        assert {one.state for one in mine if one.version < 0} <= {"starting", "draining"}
    assert sum(max(b.engine_losses for b in beats if b.rollout_id == one) for one in ("rollout-0", "rollout-1")) == (
        killed
    )
    finished: list[r.CompletedTrajectory] = told.seen["trajectories.completed"]
    names = Counter(one.trajectory_id for one in finished)
    assert max(names.values()) == 1, "sampled to its end twice"
    lives = read_lives(told.seen["trajectories.partial"], {one.trajectory_id: one for one in finished})
    trained = Counter(
        name for step in told.seen["training.steps"] if isinstance(step, r.TrainingStep) for name in step.trained
    )
    assert max(trained.values()) == 1
    assert trained.keys() <= names.keys() <= lives.keys()
    lost = [one for one in told.seen["trajectories.partial"] if isinstance(one, r.TrajectoryMoved)]
    assert all(one.to_incarnation == POOL for one in lost if one.reason == "lost")
    assert any(one.n_tokens for one in lost if one.reason == "lost"), "nothing was interrupted in the middle"
    return summary
