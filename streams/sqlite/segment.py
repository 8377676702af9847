"""Files for what is too large to lie well in SQLite. The database holds segment, position, size and digest.

A segment has one writer, which holds a lock (flock) on it as long as it lives. Bytes are appended before the
transaction that refers to them commits; a writer that dies in between leaves bytes that nothing refers to. Readers
only follow references. A segment without a living writer and without references is deleted by ``collect``.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from laminar.schemas.errors import Fatal

__all__ = ["Place", "SegmentReader", "SegmentWriter", "collect"]

_ROLL_BYTES = 128 * 1024 * 1024
_OPEN_FILES = 16
_MOST_PARTS = min(1024, os.sysconf("SC_IOV_MAX"))
"""Of one write; the system refuses more."""


class Place(NamedTuple):
    """Where a chunk lies."""

    segment: int
    position: int
    size: int
    digest: int
    """xxh3-64 of the bytes, as a signed 64-bit integer."""


def _path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:012x}.segment"


def _digest(hasher: xxhash.xxh3_64) -> int:
    return int.from_bytes(hasher.digest(), "big", signed=True)


class SegmentWriter:
    """Appends to a segment of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._segment = 0
        self._end = 0

    def append(self, parts: Sequence[bytes]) -> Place:
        """Write the parts at the end."""
        if self._fd < 0:
            self._roll()
        hasher = xxhash.xxh3_64()
        for part in parts:
            hasher.update(part)
        position = self._end
        self._end += self._write(parts)
        return Place(self._segment, position, self._end - position, _digest(hasher))

    def mark(self) -> int:
        """A transaction begins: where its first append goes. Only here a full segment is left.

        (Inside a transaction the lock would be gone from bytes that nothing refers to yet.)
        """
        if self._end >= _ROLL_BYTES:
            self.close()
        return self._end

    def rewind(self, mark: int) -> None:
        """Forget what was appended since the mark: nothing refers to it, the next append overwrites it."""
        self._end = mark

    def sync(self) -> None:
        """Make the bytes durable."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._end = -1, 0

    def _write(self, parts: Sequence[bytes]) -> int:
        n = 0
        for first in range(0, len(parts), _MOST_PARTS):
            n += self._write_at(self._end + n, parts[first : first + _MOST_PARTS])
        return n

    def _write_at(self, position: int, parts: Sequence[bytes]) -> int:
        total = sum(map(len, parts))
        written = os.pwritev(self._fd, parts, position)
        if written < total:  # a full disk raises on the next try
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                written = os.pwrite(self._fd, rest, position + total - len(rest))
                rest = rest[written:]
        return total

    def _roll(self) -> None:
        while True:
            segment = secrets.randbits(47) + 1
            path = _path(self._directory, segment)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Between open and lock a collector may have taken the file for an orphan.
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._fd, self._segment, self._end = fd, segment, 0


class SegmentReader:
    """Reads places; keeps some files open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, place: Place, where: str) -> bytes:
        """The bytes. Raises Fatal when they are not what was written, FileNotFoundError when they were deleted."""
        fd = self._files.pop(place.segment, -1)
        if fd < 0:
            fd = os.open(_path(self._directory, place.segment), os.O_RDONLY | os.O_CLOEXEC)
        self._files[place.segment] = fd
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        data = os.pread(fd, place.size, place.position)
        if len(data) != place.size or _digest(xxhash.xxh3_64(data)) != place.digest:
            file = _path(self._directory, place.segment)
            raise Fatal(f"{where}: {place.size} bytes at {place.position} of {file} are damaged")
        return data

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def collect(directory: Path, used: Callable[[int], int]) -> None:
    """Delete segments, and tails of segments, that no living writer has and nothing refers to.

    ``used(segment)``: the end of the last referenced byte, 0 for none.
    """
    for path in directory.glob("*.segment"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = used(int(path.stem, 16))
            if end == 0:
                path.unlink(missing_ok=True)
            elif end < os.fstat(fd).st_size:
                os.ftruncate(fd, end)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
