"""One slot: a file in shared memory that holds the bytes of one version, and a small note beside it.

What a slot guarantees:

* Its pages exist before anybody maps them: space is checked, then allocated, so writing never ends in SIGBUS.
* The note (``slot-000.json``) says ``staged`` or ``sealed``; no note: the slot is free. Notes change by rename only.
* Who reads or writes a slot holds a lease: a shared ``flock`` on the file. The kernel drops it with the last
  descriptor and the last mapping of it, also after kill -9. Only a slot without leases is ever written anew.
* A note carries the nonce of its reservation, so that a writer whose slot was given away notices it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from laminar.schemas.errors import ConfigError, Unavailable, WeightsMismatch

__all__ = ["Lease", "Mappings", "Note", "Slot", "allocate", "lease", "leased", "replace_file", "sealed", "slots"]

_NAME = re.compile(r"slot-(\d{3,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What stands beside a slot that is in use."""

    state: Literal["staged", "sealed"]
    nonce: str
    epoch: int
    version: int
    root_digest: str = ""
    """Empty until sealed."""

    @property
    def names(self) -> tuple[int, int, str]:
        """The version that the slot holds: epoch, version, root digest."""
        return self.epoch, self.version, self.root_digest


@dataclass(frozen=True, slots=True)
class Slot:
    """The files of one slot."""

    folder: Path
    index: int

    @property
    def data(self) -> Path:
        """The weights' bytes."""
        return self.folder / f"slot-{self.index:03d}"

    @property
    def manifest(self) -> Path:
        """The manifest of a sealed slot, JSON: what a restarted relay verifies it against."""
        return self.folder / f"slot-{self.index:03d}.manifest"

    @property
    def _note(self) -> Path:
        return self.folder / f"slot-{self.index:03d}.json"

    def note(self) -> Note | None:
        """The slot's note; None: the slot is free (or the folder is gone)."""
        try:
            return Note(**json.loads(self._note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def write_note(self, note: Note) -> None:
        """Replace the note at once."""
        plain = asdict(note)
        replace_file(self._note, json.dumps(plain).encode())

    def free(self) -> None:
        """Remove the note: nobody finds the version any more. Leases taken before go on."""
        self._note.unlink(missing_ok=True)

    def capacity(self) -> int:
        """Bytes allocated; 0 if the file is missing."""
        try:
            return self.data.stat().st_size
        except OSError:
            return 0


def replace_file(path: Path, content: bytes) -> None:
    """Write beside, then rename: readers see the old or the new content. Raises ConfigError: the space is used up."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"relay.shm_dir: {path}: {error.strerror}") from error


def slots(folder: Path) -> list[Slot]:
    """The slots of a folder, in order; empty if it does not exist."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = (_NAME.fullmatch(name) for name in names)
    return [Slot(folder, index) for index in sorted(int(m.group(1)) for m in found if m)]


def allocate(path: Path, size: int) -> None:
    """Make the file at least ``size`` bytes long, every page allocated; what it holds stays.

    Raises ConfigError, with both numbers, if the file system has less space; nothing is allocated then.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        have = os.fstat(fd).st_size
        if have >= size:
            return
        stat = os.fstatvfs(fd)
        free = stat.f_bavail * stat.f_frsize
        if free < size - have:
            raise ConfigError(_too_small(path, size - have, free))
        try:
            os.posix_fallocate(fd, have, size - have)
        except OSError as error:  # another process was faster: ENOSPC
            os.ftruncate(fd, have)
            raise ConfigError(_too_small(path, size - have, free)) from error
    finally:
        os.close(fd)
        if not path.stat().st_size:
            path.unlink()


def _too_small(path: Path, need: int, free: int) -> str:
    return (
        f"shared memory too small: a slot for the weights needs {need} bytes, {path.parent} has {free} free "
        "(enlarge it, in a container with --shm-size, lower relay.keep_versions, or set relay.shm_root)"
    )


class Lease:
    """A shared lock on a slot's file: while it is held, the slot is not written anew."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def fd(self) -> int:
        """The open descriptor."""
        return self._fd

    def map(self, size: int) -> mmap.mmap:
        """Map the first ``size`` bytes copy-on-write: nothing that the reader does can reach the slot.

        The mapping keeps the lease alive.
        """
        have = os.fstat(self._fd).st_size
        if have < size:
            raise WeightsMismatch(f"a slot holds {have} bytes, {size} expected")
        no_reserve = 0x4000  # MAP_NORESERVE: a private mapping that nobody writes needs no memory of its own
        return mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Give up the descriptor; the lease ends with the last mapping made from it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mappings:
    """Slots that stay mapped, writable, between uses; not leases.

    Mapping a slot afresh costs a page fault for each of its pages, which takes longer than copying the weights.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[int, mmap.mmap]] = {}

    def get(self, path: Path) -> mmap.mmap:
        """The whole slot, mapped. Raises Unavailable when it is gone. Its earlier mapping ends if the slot grew."""
        for known in list(self._maps):
            if known != path and _inode(known) != self._maps[known][0]:
                self._drop(known)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error
        try:
            stat = os.fstat(fd)
            inode, mapped = self._maps.get(path, (-1, None))
            if mapped is None or inode != stat.st_ino or len(mapped) != stat.st_size:
                self._drop(path)
                mapped = mmap.mmap(fd, stat.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                self._maps[path] = stat.st_ino, mapped
            return mapped
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap everything that is not in use."""
        for path in list(self._maps):
            self._drop(path)

    def _drop(self, path: Path) -> None:
        _, mapped = self._maps.pop(path, (0, None))
        if mapped is not None:
            with suppress(BufferError):  # in use: it ends with its last user
                mapped.close()


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def lease(path: Path) -> Lease:
    """Take a lease. Raises Unavailable when the file is gone or is being given to a writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    for attempt in range(50):  # an exclusive lock lasts microseconds: see leased
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.0002 * attempt)
        else:
            return Lease(fd)
    os.close(fd)
    raise Unavailable(f"{path}: the slot is locked by its relay")


def leased(path: Path) -> bool:
    """Whether any living process holds a lease on the slot."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sealed(folder: Path, epoch: int, version: int, root_digest: str) -> Iterator[Slot]:
    """Slots of a folder whose note says that they hold this version."""
    for slot in slots(folder):
        note = slot.note()
        if note and note.state == "sealed" and note.names == (epoch, version, root_digest):
            yield slot
