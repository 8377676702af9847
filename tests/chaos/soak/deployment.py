"""A real deployment to break: a broker, ``laminar run``, and a process for every operator.

Rollouts answer by script (``engine: scripted``), so that the log is what is stressed; the trainer is the real one on a
model of a few thousand parameters. Everything is in one folder.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laminar.operators.rollout.engines.scripted import seeded
from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.streams.broker import Broker

__all__ = ["SCRIPT", "Deployment", "children_of"]

VOCABULARY = "abcdefgh>"
MIN_TOKENS, MAX_TOKENS = 8, 96
VOCAB_SIZE = 4 + len(VOCABULARY)
SCRIPT = seeded(min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS, vocab_size=VOCAB_SIZE)
"""Every answer of a rollout, whichever process gives it."""

_RUN = """\
name: soak
steps: 1000000
groups_per_step: 8
group_size: 4
model: {{path: model}}
log: {{kind: kafka, bootstrap: "{bootstrap}", request_timeout_s: 8, transaction_timeout_s: 12}}
operators:
  prompts:
    train: {{path: train.jsonl}}
    eval: {{path: heldout.jsonl}}
    sampling: {{max_tokens: 100}}
    max_outstanding_groups: 40
  rollout:
    replicas: {rollouts}
    engine: {engine}
    heartbeat_s: 0.5
    lease_s: 6
    load_timeout_s: 4
    delta_s: 0.3
  reward: {{replicas: {rewards}, function: "scoring:share", concurrency: 1}}
  repack: {{replicas: {repacks}, period_s: 1, dead_after_s: 6}}
  relay: {{keep_versions: 16}}
  trainer: {{optimizer: {{lr: 1.0e-4}}, algorithm: {{zero_advantage: keep}}}}
supervisor: {{no_progress_timeout_s: 240, max_restarts_in_a_row: 40}}
"""
_SCORING = """\
def share(trajectory):
    ids = trajectory.response.ids_T
    return float((ids % 2).mean()) if len(ids) else 0.0
"""
_SESSION_S = 4.0
_STOP_S = 60.0


def children_of(folder: Path) -> dict[str, int]:
    """Instance -> process id, of every operator process that runs on this run folder's configuration."""
    config = str(folder / "config.yaml")
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_text().split("\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if words[2:3] == ["laminar.pipeline.process"] and words[5:6] == [config] and state != "Z":
            found[f"{words[3]}-{words[4]}"] = int(entry.name)
    return found


@dataclass
class Deployment:
    """See the module's docstring. ``open`` it; ``close`` leaves no process."""

    folder: Path
    rollouts: int = 3
    rewards: int = 2
    repacks: int = 2
    script: Mapping[str, object] = field(default_factory=dict)
    """More settings of the scripted engine."""
    settings: tuple[str, ...] = ()
    """Overrides of the run file."""
    broker: Broker = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.run_folder = self.folder / "runs" / "soak"
        self.clocks = self.folder / "clocks"
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        """Of ``laminar run``."""

    @property
    def instances(self) -> tuple[str, ...]:
        """Every operator process."""
        names = {"prompts": 1, "rollout": self.rollouts, "reward": self.rewards, "repack": self.repacks}
        names |= {"relay": 1, "trainer": 1}
        return tuple(f"{name}-{index}" for name, count in names.items() for index in range(count))

    def open(self) -> None:
        """Write the files and start the broker."""
        self.clocks.mkdir(parents=True, exist_ok=True)
        self._write_data()
        self.broker = Broker(self.folder / "broker", port=0, session_timeout_s=_SESSION_S, heap_mb=384)
        answers = {"min_tokens": MIN_TOKENS, "max_tokens": MAX_TOKENS, "vocab_size": VOCAB_SIZE, "tokens_per_s": 25}
        engine = {"kind": "scripted", **answers, "max_model_len": 128, **self.script}
        (self.folder / "run.yaml").write_text(
            _RUN.format(
                bootstrap=self.broker.bootstrap,
                rollouts=self.rollouts,
                rewards=self.rewards,
                repacks=self.repacks,
                engine=json.dumps(engine),
            )
        )
        self.broker.start()

    def config(self) -> RunConfig:
        """The run file, resolved."""
        return load_config(self.run_folder, []).config

    def start(self, *settings: str) -> None:
        """Start ``laminar run``; on the same folder it resumes."""
        assert not self.running
        clock = Path(__file__).parent / "clock"
        path = os.pathsep.join([str(clock), str(self.folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with (self.folder / "run.out").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml", *self.settings, *settings],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path, "SOAK_CLOCKS": str(self.clocks)},
                start_new_session=True,
            )
        self.starts += 1

    @property
    def running(self) -> bool:
        """Whether ``laminar run`` lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the newest ``laminar run``; None while it lives."""
        return self._process.poll() if self._process is not None else None

    def pid(self, instance: str) -> int | None:
        """Of an operator's process, the supervisor or the broker."""
        if instance == "supervisor":
            return self._process.pid if self._process is not None and self.running else None
        if instance == "broker":
            return self.broker.pid
        return children_of(self.run_folder).get(instance)

    def send(self, instance: str, number: signal.Signals) -> int | None:
        """Send a signal; the process that got it, None when there is no such process now."""
        pid = self.pid(instance)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return None
        return pid

    def limit_files(self, instance: str, n_bytes: int | None) -> bool:
        """From now on no file of this process, and of those that it starts, may grow above so many bytes."""
        pid = self.pid(instance)
        if pid is None:
            return False
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if n_bytes is None else n_bytes, hard))
        except ProcessLookupError:
            return False
        return True

    def log_path(self, instance: str) -> Path:
        """Of an operator's process."""
        return self.run_folder / "logs" / f"{instance}.log"

    def output(self, n_bytes: int = 6000) -> str:
        """The end of what ``laminar run`` printed."""
        path = self.folder / "run.out"
        return path.read_bytes()[-n_bytes:].decode("utf-8", "replace") if path.exists() else ""

    def stop(self) -> int:
        """SIGTERM to ``laminar run``; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=_STOP_S)

    def wait(self, timeout_s: float) -> int:
        """For the end of ``laminar run``; its exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout=timeout_s)

    def close(self) -> None:
        """Kill what is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 20.0
        while (left := children_of(self.run_folder)) and time.monotonic() < deadline:
            for pid in left.values():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self.broker.kill()

    def _write_data(self) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = symbol_tokenizer(list(VOCABULARY), separator="", max_length=128)
        tokenizer.save_pretrained(self.folder / "model")
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
                pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ).save_pretrained(self.folder / "model")  # fmt: skip
        letters = VOCABULARY[:-1]
        rows = [{"prompt": f"{a}{b}{c}>", "answer": a} for a in letters for b in letters for c in letters]
        (self.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
        (self.folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
        (self.folder / "scoring.py").write_text(_SCORING)
