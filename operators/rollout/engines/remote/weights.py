"""Weights for an engine in another process: by the files that they lie in, never through the connection.

Tensors that no other process can map (a test's, or a source without files) are copied into memory that it can.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from laminar.operators.weights import TensorView
from laminar.schemas.errors import Unavailable

__all__ = ["mapped", "placed"]

_ALIGN = 64

Table = Mapping[str, Any]
"""``files``: paths; ``tensors``: of each its name, dtype, shape, place in ``files``, offset and bytes."""


@contextmanager
def placed(weights: Mapping[str, TensorView]) -> Iterator[Table]:
    """Where each tensor lies, as JSON knows it; valid while open."""
    homeless = {name: view for name, view in weights.items() if not view.path}
    files: dict[str, int] = {}
    fd = -1
    try:
        offsets: dict[str, int] = {}
        path = ""
        if homeless:
            fd = os.memfd_create("laminar-weights", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            offsets = _copied(fd, homeless)
        tensors = [
            [
                name,
                view.dtype,
                list(view.shape),
                files.setdefault(view.path or path, len(files)),
                offsets[name] if not view.path else view.offset,
                view.data.nbytes,
            ]
            for name, view in weights.items()
        ]
        yield {"files": list(files), "tensors": tensors}
    finally:
        if fd >= 0:
            os.close(fd)


def _copied(fd: int, weights: Mapping[str, TensorView]) -> dict[str, int]:
    """Copy them into the file; where each of them begins."""
    offsets, total = {}, 0
    for name, view in weights.items():
        offsets[name] = total
        total += -(-view.data.nbytes // _ALIGN) * _ALIGN
    if total:
        os.ftruncate(fd, total)
        with mmap.mmap(fd, total) as memory:
            for name, view in weights.items():
                memory[offsets[name] : offsets[name] + view.data.nbytes] = view.data.cast("B")
    return offsets


@contextmanager
def mapped(table: Table) -> Iterator[Mapping[str, TensorView]]:
    """The tensors of a table, without a copy. Raises Unavailable, naming the file that cannot be had."""
    maps: list[mmap.mmap | bytes] = []
    for path in table["files"]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                # Copy-on-write: nothing that a reader does to them can reach the file.
                maps.append(mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else b"")
            finally:
                os.close(fd)
        except OSError as error:
            raise Unavailable(f"weights: {path} cannot be mapped: {error.strerror}") from error
    whole = [memoryview(one) for one in maps]
    views = {}
    for name, dtype, shape, file, offset, n_bytes in table["tensors"]:
        data = whole[file][offset : offset + n_bytes]
        if data.nbytes != n_bytes:
            raise Unavailable(f"weights.{name}: {table['files'][file]} ends before byte {offset + n_bytes}")
        views[name] = TensorView(dtype=dtype, shape=tuple(shape), data=data, path=table["files"][file], offset=offset)
    try:
        yield views
    finally:
        for one in (*(view.data for view in views.values()), *whole):
            with suppress(BufferError):  # something refers to it still: it keeps the mapping
                one.release()
        for memory in maps:
            if isinstance(memory, mmap.mmap):
                with suppress(BufferError):
                    memory.close()
