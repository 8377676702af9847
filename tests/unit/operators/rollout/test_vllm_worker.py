"""A worker process ends when its engine says so, or with the process that started it, and for no other reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.operators.rollout.engines.vllm_worker import leave

WORKER = """
import os, sys, time
parent = os.getppid()
from laminar.operators.rollout.engines.vllm_worker import settle
settle(None, parent, {tied})
sys.stdout.write(str(os.getpid()) + "\\n")
sys.stdout.flush()
time.sleep(120)
"""
STARTER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
WAIT_S = 60.0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_ignores_the_signals_of_a_group_and_ends_with_its_starter() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, WORKER.format(tied=True)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = 0
    try:
        pid = int(starter.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        time.sleep(0.5)  # for one that does end
        assert _runs(pid)
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    deadline = time.monotonic() + WAIT_S
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def test_the_names_of_shared_memory_go_once_the_workers_have_found_each_other(tmp_path: Path) -> None:
    group = f"laminar_test_{os.getpid()}"
    left = [Path("/dev/shm") / f"{group}-tp:0-[0-1]-cpushm_{rank}" for rank in (0, 1)]
    other = Path("/dev/shm") / f"{group}x-tp:0"
    for path in (*left, other):
        path.write_bytes(b"")
    try:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER.format(tied=False)],
            stdout=subprocess.PIPE,
            env={**os.environ, "VLLM_DIST_IDENT": group},
            cwd=tmp_path,
        )
        assert worker.stdout is not None
        worker.stdout.readline()
        assert not any(path.exists() for path in left)
        assert other.exists()
        worker.kill()
        worker.wait()
        worker.stdout.close()
    finally:
        for path in (*left, other):
            path.unlink(missing_ok=True)


def test_a_worker_that_is_told_to_leave_does_not_answer() -> None:
    with pytest.raises(SystemExit):
        leave(None)
