"""A relay, or a trainer that publishes without end, as a process of its own over a SQLite log.

``python -m tests.support.relay_process relay|trainer FOLDER SHM INDEX``; it ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from laminar.operators.relay.versions import VersionFollower
from laminar.streams.deadline import Deadline
from laminar.streams.sqlite import SqliteLog
from tests.support.relays import RelayRun

__all__ = ["N_TENSORS", "TENSOR_FLOATS"]

N_TENSORS = 8
TENSOR_FLOATS = 100_000


def _trainer(run: RelayRun, epoch: int) -> None:
    """Publish version after version, each as far above the last as the log says."""
    follower = VersionFollower(run.context("trainer-0"))
    follower.catch_up(Deadline.after(30, "read weights.versions"))
    highest = max((version for _, version, _ in follower.published), default=-1)
    publisher = run.publisher()
    while True:
        highest += 1
        run.publish(publisher, highest, epoch=epoch, n=N_TENSORS, size=TENSOR_FLOATS)
        sys.stdout.write(f"{highest}\n")
        sys.stdout.flush()


def _exit_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main(kind: str, folder: str, shm: str, index: str) -> None:
    run = RelayRun(Path(folder), Path(shm), SqliteLog(Path(folder) / "log"))
    if kind == "relay":
        run.relay(int(index), keep_versions=2, chunk_bytes=65536)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    else:
        trainer = threading.Thread(target=_trainer, args=(run, int(index)), daemon=True)
        trainer.start()
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
        trainer.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
