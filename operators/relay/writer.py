"""Copies tensors into a leased slot, and digests each chunk in another thread while its bytes are hot.

The number of bytes need not be known before: the slot grows (checked, allocated) when an iterator of tensors, such as
a sharded model gathered one parameter at a time, yields more than was reserved.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from pathlib import Path

from laminar.operators.relay.manifest import ALIGNMENT, chunk_digest
from laminar.operators.relay.slot import Mappings, allocate
from laminar.operators.weights import NamedTensor
from laminar.schemas.errors import WeightsMismatch
from laminar.schemas.records import TensorEntry
from laminar.streams.deadline import Deadline

__all__ = ["SlotWriter"]


class SlotWriter:
    """Writes one version into one slot, which the caller has leased."""

    def __init__(self, path: Path, mappings: Mappings, *, chunk_bytes: int, pool: Executor, deadline: Deadline) -> None:
        self._path = path
        self._mappings = mappings
        self._chunk = chunk_bytes
        self._pool = pool
        self._deadline = deadline
        self._map: mmap.mmap = mappings.get(path)
        self._digests: list[Future[bytes]] = []
        self._end = 0
        self.tensors: list[TensorEntry] = []

    @property
    def total_bytes(self) -> int:
        """Bytes written, gaps between tensors included."""
        return self._end

    def add(self, tensor: NamedTensor) -> None:
        """Append one tensor at the next aligned offset. Raises WeightsMismatch, ConfigError, DeadlineExceeded."""
        data = tensor.data
        if not data.c_contiguous:
            raise WeightsMismatch(f"tensor {tensor.name!r}: not contiguous in row-major order")
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        size = data.nbytes
        self._ensure(offset + size)
        self._write(bytes(offset - self._end))
        if size:
            with data.cast("B") as plain:
                self._write(plain)
        self.tensors.append(
            TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset, size=size)
        )

    def finish(self) -> bytes:
        """Digests of all chunks, in order."""
        if self._end % self._chunk:
            self._digest(self._end - self._end % self._chunk, self._end)
        digests: list[bytes] = []
        for future in self._digests:
            self._deadline.check("digests")
            digests.append(future.result())
        return b"".join(digests)

    def close(self) -> None:
        """Wait until nothing reads the slot any more."""
        wait(self._digests)

    def _write(self, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            self._deadline.check("copying weights")
            stop = min(done + self._chunk - self._end % self._chunk, len(data))
            self._map[self._end : self._end + stop - done] = data[done:stop]
            self._end += stop - done
            done = stop
            if self._end % self._chunk == 0:
                self._digest(self._end - self._chunk, self._end)

    def _digest(self, start: int, stop: int) -> None:
        self._digests.append(self._pool.submit(_digest_of(self._map, start, stop)))

    def _ensure(self, size: int) -> None:
        if size > len(self._map):
            wait(self._digests)
            allocate(self._path, max(size, len(self._map) + len(self._map) // 4))
            self._map = self._mappings.get(self._path)


def _digest_of(mapped: mmap.mmap, start: int, stop: int) -> Callable[[], bytes]:
    def digest() -> bytes:
        with memoryview(mapped) as whole, whole[start:stop] as chunk:
            return chunk_digest(chunk)

    return digest
