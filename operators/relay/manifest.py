"""The manifest's arithmetic: chunks, digests, tensor views, and the JSON form that relays exchange.

A version is one range of bytes, cut into chunks of ``chunk_bytes`` (the last may be shorter). Chunk digests are
xxh3-64, little-endian; the root digest is xxh3-128 over them, so two versions with the same root hold the same bytes.

>>> root_digest(chunk_digest(b"weights"))
'6ad0ca54ac7af63060f71506520ba80a'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import xxhash

from laminar.operators.weights import TensorView
from laminar.schemas.errors import WeightsMismatch
from laminar.schemas.records import TensorEntry, VersionManifest

__all__ = [
    "ALIGNMENT",
    "check",
    "chunk_digest",
    "chunk_ok",
    "chunk_range",
    "from_json",
    "label",
    "n_chunks",
    "root_digest",
    "tensor_views",
    "to_json",
]

ALIGNMENT = 256
"""Bytes: tensors start at multiples of it (any dtype, and what GPU copies like)."""

_DIGEST_BYTES = 8
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def label(manifest: VersionManifest) -> str:
    """How messages name a version."""
    return f"version {manifest.version} (epoch {manifest.epoch})"


def chunk_digest(chunk: bytes | memoryview) -> bytes:
    """xxh3-64 of one chunk, 8 bytes little-endian. Releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(chunk).to_bytes(_DIGEST_BYTES, "little")


def root_digest(chunk_digests: bytes) -> str:
    """xxh3-128 over the chunk digests, hex."""
    return xxhash.xxh3_128_hexdigest(chunk_digests)


def n_chunks(manifest: VersionManifest) -> int:
    """Number of chunks."""
    return -(-manifest.total_bytes // manifest.chunk_bytes)


def chunk_range(manifest: VersionManifest, index: int) -> tuple[int, int]:
    """First byte of a chunk, and the byte after its last."""
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.total_bytes)


def chunk_ok(manifest: VersionManifest, index: int, chunk: memoryview) -> bool:
    """Whether these bytes are the manifest's chunk."""
    wanted = manifest.chunk_digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
    return chunk_digest(chunk) == wanted


def check(manifest: VersionManifest) -> None:
    """Raise WeightsMismatch unless the manifest agrees with itself (sizes, digests, table, tied names)."""
    where = label(manifest)
    if manifest.total_bytes <= 0 or manifest.chunk_bytes <= 0:
        raise WeightsMismatch(f"{where}: {manifest.total_bytes} bytes in chunks of {manifest.chunk_bytes}")
    if len(manifest.chunk_digests) != n_chunks(manifest) * _DIGEST_BYTES:
        raise WeightsMismatch(
            f"{where}: {len(manifest.chunk_digests)} bytes of chunk digests for {n_chunks(manifest)} chunks (8 each)"
        )
    if root_digest(manifest.chunk_digests) != manifest.root_digest:
        raise WeightsMismatch(f"{where}: the root digest does not match the chunk digests")
    names: set[str] = set()
    for entry in manifest.tensors:
        _check_entry(where, manifest.total_bytes, entry)
        if entry.name in names:
            raise WeightsMismatch(f"{where}: tensor {entry.name!r} stands twice in the table")
        names.add(entry.name)
    for alias, name in manifest.tied.items():
        if alias in names:
            raise WeightsMismatch(f"{where}: {alias!r} is declared as tied to {name!r} but has bytes of its own")
        if name not in names:
            raise WeightsMismatch(f"{where}: {alias!r} is tied to {name!r}, which is not in the table")


def _check_entry(where: str, total: int, entry: TensorEntry) -> None:
    if entry.offset < 0 or entry.size < 0 or entry.offset + entry.size > total:
        raise WeightsMismatch(
            f"{where}: tensor {entry.name!r} lies at {entry.offset}+{entry.size}, outside of {total} bytes"
        )
    item = _ITEM_BYTES.get(entry.dtype)
    if item is not None and math.prod(entry.shape) * item != entry.size:
        raise WeightsMismatch(
            f"{where}: tensor {entry.name!r} of {entry.dtype} {list(entry.shape)} has {entry.size} bytes, "
            f"not {math.prod(entry.shape) * item}"
        )


def tensor_views(manifest: VersionManifest, data: memoryview, path: str = "") -> dict[str, TensorView]:
    """The tensors of the table as slices of ``data``, without a copy. Tied names are the reader's to resolve.

    ``path``: a file with the same bytes from its beginning, for other processes.
    """
    return {
        e.name: TensorView(
            dtype=e.dtype,
            shape=e.shape,
            data=data[e.offset : e.offset + e.size],
            path=path,
            offset=e.offset if path else 0,
        )
        for e in manifest.tensors
    }


def to_json(manifest: VersionManifest) -> dict[str, Any]:
    """Plain values for ``json.dumps``: what belongs to the bytes.

    Without the probes. They are for who samples, and come with the log; a relay of another release takes the rest.
    """
    plain = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest) if f.name != "probes"}
    plain["chunk_digests"] = manifest.chunk_digests.hex()
    plain["tensors"] = [[e.name, e.dtype, list(e.shape), e.offset, e.size] for e in manifest.tensors]
    plain["tied"] = dict(manifest.tied)
    plain["meta"] = dict(manifest.meta)
    return plain


def from_json(plain: Mapping[str, Any]) -> VersionManifest:
    """Inverse of to_json, without probes. Raises WeightsMismatch when it is not a manifest."""
    try:
        fields = dict(plain)
        fields["chunk_digests"] = bytes.fromhex(fields["chunk_digests"])
        fields["tensors"] = tuple(
            TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, size=size)
            for name, dtype, shape, offset, size in fields["tensors"]
        )
        manifest = VersionManifest(**fields)
        check(manifest)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WeightsMismatch(f"not a version manifest: {error}") from error
    return manifest
