from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from laminar.operators.relay.slot import slots
from laminar.operators.relay.source import RelaySource
from laminar.operators.relay.versions import VersionFollower
from laminar.schemas.errors import DeadlineExceeded, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.sqlite import SqliteLog
from tests.support.relay_process import N_TENSORS
from tests.support.relays import RelayRun, relay_run, soon

ROOT = Path(__file__).parents[3]


class World:
    """A run of killable processes, and a reader in this one."""

    def __init__(self, run: RelayRun) -> None:
        self.run = run
        self.folder = run.shm / "run"
        self.source: RelaySource = run.source()
        self.versions = VersionFollower(run.context("rollout-0"))
        self.seen: set[int] = set()
        self._children: list[subprocess.Popen[str]] = []

    def start(self, kind: str, index: int) -> subprocess.Popen[str]:
        """A process that has said its first line."""
        command = [sys.executable, "-m", "tests.support.relay_process", kind, str(self.run.tmp), str(self.run.shm)]
        child = subprocess.Popen(
            [*command, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline()
        return child

    def kill(self, child: subprocess.Popen[str]) -> None:
        """kill -9."""
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()

    def read(self) -> None:
        """Open the newest committed version, if it is still there: it is that version and nothing else."""
        self.versions.poll()
        manifest = self.versions.newest
        assert manifest is not None
        with (
            contextlib.suppress(DeadlineExceeded, Unavailable),
            self.source.open(manifest, Deadline.after(0.2, "open the newest version")) as tensors,
        ):
            assert len(tensors) == N_TENSORS
            for i, view in enumerate(tensors.values()):
                assert set(np.unique(np.frombuffer(view.data, np.float32)).tolist()) == {manifest.version * 1000.0 + i}
            self.seen.add(manifest.version)

    def read_for(self, seconds: float) -> None:
        """Read again and again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read()

    def read_newer(self) -> None:
        """Read until a version comes that was not there before."""
        self.versions.poll()
        before = self.versions.newest.version if self.versions.newest else -1
        soon(lambda: self.read() or max(self.seen, default=-1) > before, f"a version above {before} is read")

    def close(self) -> None:
        for child in self._children:
            if child.poll() is None:
                self.kill(child)
        self.versions.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with relay_run(tmp_path, SqliteLog(tmp_path / "log")) as run:
        made = World(run)
        try:
            yield made
        finally:
            made.close()
            run.log.close()


def test_d6_kill_during_publication_never_shows_half_a_version_nor_mixes_two(world: World) -> None:
    world.start("relay", 0)
    for epoch in range(3):
        trainer = world.start("trainer", epoch)
        world.read_for(0.25 + 0.037 * epoch)
        world.kill(trainer)
        world.read()
    world.start("trainer", 3)
    world.read_newer()
    assert len(world.seen) >= 4
    # kept versions, one being written, one leased by this reader: the dead trainers' slots are in use again
    (folder,) = world.run.shm.iterdir()
    assert len(slots(folder)) <= 4


def test_kill_of_the_relay_loses_no_sealed_version_and_publication_goes_on(world: World) -> None:
    relay = world.start("relay", 0)
    trainer = world.start("trainer", 0)
    world.read_newer()
    for _ in range(2):
        world.kill(relay)
        world.read()  # what is sealed can be mapped while the relay is dead
        relay = world.start("relay", 0)
        world.read_newer()
    assert trainer.poll() is None
