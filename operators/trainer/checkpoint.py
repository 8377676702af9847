"""Checkpoints: the trainer's whole state as one atomic object on disk.

The folder holds ``{step}.{epoch}/`` for each checkpoint and the pointer ``latest.json``, which lists the complete ones,
newest first. Saving is::

    1. write all parts into  .{step}.{epoch}.partial/, each synced     a crash leaves rubbish that nobody reads
    2. sync that folder, rename it to {step}.{epoch}/, sync the parent
    3. write the pointer beside itself, sync it, rename it, sync        from here on the new one counts
    4. delete every checkpoint that the pointer does not list

So a complete checkpoint exists at any time once the first was saved, also with ``keep: 1``. The pointer is there from
the first start on (listing nothing); checkpoints without a pointer are an error, not a new run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.operators.trainer.learner import Learner
from laminar.schemas.errors import CheckpointError, Fenced

__all__ = ["Checkpoints", "Disk", "Saved"]

_POINTER = "latest.json"
_STATE = "state.json"
_RECORDS = "records.bin"


class Disk:
    """The file-system operations of a save, one method each, so that a test can crash after any of them."""

    def make(self, folder: Path) -> None:
        """Create a folder and its parents."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file (not yet durable)."""
        path.write_bytes(data)

    def save(self, learner: Learner, folder: Path) -> None:
        """Let the learner write its files (not yet durable)."""
        learner.save(folder)

    def sync(self, path: Path) -> None:
        """Make a file's bytes, or a folder's entries, durable."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` atomically."""
        source.replace(target)

    def remove(self, folder: Path) -> None:
        """Delete a folder and what is in it."""
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds besides the learner's files."""

    state: dict[str, Any]
    """JSON: step, version, epoch, offsets and so on (``progress.py`` makes and reads it)."""
    records: tuple[bytes, ...]
    """Framed records of waiting groups."""


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path, *, keep: int, disk: Disk | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._disk = disk or Disk()

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder

    @property
    def begun(self) -> bool:
        """Whether a run was ever started with this folder."""
        return (self._folder / _POINTER).exists()

    def begin(self) -> None:
        """Write a pointer that lists nothing, unless there is one. Raises CheckpointError as ``names`` does."""
        if self.names() or self.begun:
            return
        self._disk.make(self._folder)
        self._point([])

    def names(self) -> list[str]:
        """Complete checkpoints, newest first. Raises CheckpointError when there are some but no pointer (B8)."""
        pointer = self._folder / _POINTER
        try:
            listed = json.loads(pointer.read_bytes())["checkpoints"]
            if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed):
                raise ValueError("no list of names")
        except FileNotFoundError:
            orphans = self._there()
            if orphans:
                raise CheckpointError(
                    f"{pointer}: missing, but {self._folder} holds checkpoints ({', '.join(orphans[:3])}); restore the"
                    f' pointer as {{"checkpoints": ["NAME"]}}, or move them away to begin at step 0'
                ) from None
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{pointer}: unreadable ({error})") from error
        return listed

    def save(self, name: str, saved: Saved, learner: Learner) -> None:
        """Save under ``{step}.{epoch}``; returns when it is durable and the pointer names it first.

        Raises OSError; Fenced when a trainer of a newer epoch has saved here: this one slept, and must not push its
        older state in front of its successor's.
        """
        disk, folder = self._disk, self._folder
        known = [n for n in self.names() if n != name]
        newer = [n for n in known if _epoch(n) > _epoch(name)]
        if newer:
            raise Fenced(f"{folder / name}: not saved, since a newer trainer has saved {newer[0]}")
        partial, final = folder / f".{name}.partial", folder / name
        disk.remove(partial)
        disk.make(partial)
        disk.save(learner, partial)
        disk.write(partial / _RECORDS, b"".join(saved.records))
        state = {**saved.state, "identity": learner.identity, "record_sizes": [len(r) for r in saved.records]}
        disk.write(partial / _STATE, json.dumps(state).encode())
        for path in sorted(partial.iterdir()):
            disk.sync(path)
        disk.sync(partial)
        disk.rename(partial, final)
        disk.sync(folder)
        listed = [name, *known][: self._keep]
        self._point(listed)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name not in listed:
                disk.remove(path)

    def load(self, learner: Learner) -> Saved | None:
        """Restore the newest checkpoint into the learner; None when the run has none yet. Raises CheckpointError."""
        names = self.names()
        if not names:
            return None
        path = self._folder / names[0]
        try:
            state = json.loads((path / _STATE).read_bytes())
            packed = (path / _RECORDS).read_bytes()
            sizes, identity = state["record_sizes"], state["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error
        if identity != learner.identity:
            raise CheckpointError(
                f"{path}: saved from model {identity}, but this run's model is {learner.identity}"
                f" (use the model that it was saved from, or another run_dir)"
            )
        if sum(sizes) != len(packed):
            raise CheckpointError(f"{path / _RECORDS}: {len(packed)} bytes, {sum(sizes)} are needed")
        learner.load(path)
        return Saved(state, _cut(packed, sizes))

    def _point(self, listed: list[str]) -> None:
        beside, pointer = self._folder / f"{_POINTER}.partial", self._folder / _POINTER
        self._disk.write(beside, json.dumps({"checkpoints": listed}).encode())
        self._disk.sync(beside)
        self._disk.rename(beside, pointer)
        self._disk.sync(self._folder)

    def _there(self) -> list[str]:
        """Names of all checkpoint folders, complete or not (without partial ones)."""
        if not self._folder.is_dir():
            return []
        return sorted(p.name for p in self._folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _cut(packed: bytes, sizes: Sequence[int]) -> tuple[bytes, ...]:
    records: list[bytes] = []
    at = 0
    for size in sizes:
        records.append(packed[at : at + size])
        at += size
    return tuple(records)


def _epoch(name: str) -> int:
    return int(name.rpartition(".")[2])
