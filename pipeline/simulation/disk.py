"""The trainer's disk: real files in a folder in memory, no waiting, and a place to die after each operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from laminar.operators.trainer.checkpoint import Disk
from laminar.operators.trainer.learner import Learner

__all__ = ["SimulatedDisk"]


class SimulatedDisk(Disk):
    """``on_pointer`` is told the step of the newest complete checkpoint whenever the pointer changes."""

    def __init__(self, point: Callable[[str], None], on_pointer: Callable[[int], None]) -> None:
        self._point = point
        self._on_pointer = on_pointer

    def make(self, folder: Path) -> None:
        """See Disk."""
        super().make(folder)
        self._point("disk")

    def write(self, path: Path, data: bytes) -> None:
        """See Disk."""
        super().write(path, data)
        self._point("disk")

    def save(self, learner: Learner, folder: Path) -> None:
        """See Disk."""
        super().save(learner, folder)
        self._point("disk")

    def sync(self, path: Path) -> None:
        """Nothing: no machine dies here."""

    def rename(self, source: Path, target: Path) -> None:
        """See Disk."""
        super().rename(source, target)
        if target.suffix == ".json":
            listed = json.loads(target.read_bytes())["checkpoints"]
            self._on_pointer(int(listed[0].partition(".")[0]) if listed else 0)
        self._point("disk")
