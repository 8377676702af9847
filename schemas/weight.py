"""Policy versions: manifests, and the relays that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["HeldVersion", "RelayStatus", "TensorEntry", "VersionManifest", "VersionState"]

VersionState = Literal["prepared", "committed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor inside a version's byte range."""

    name: str
    dtype: str
    """safetensors' names: ``F32``, ``BF16``, ``F16``, ..."""
    shape: tuple[int, ...]
    offset: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """A policy version: topic ``weights.versions``, key ``run_id``. Only ``committed`` versions are ever applied."""

    run_id: str
    epoch: int
    """The trainer's fencing epoch: a manifest of an older epoch is void once a newer one is seen."""
    version: int
    """Counts optimizer steps; after a crash it goes on above the highest number ever published."""
    parent: int
    """The version it was made from; -1 for the first."""
    step: int
    """Optimizer steps behind these weights."""
    state: VersionState
    tensors: tuple[TensorEntry, ...]
    total_bytes: int
    chunk_bytes: int
    chunk_digests: bytes
    """xxh3-64 of each chunk, 8 bytes little-endian each, in order."""
    root_digest: str
    """xxh3-128 over ``chunk_digests``, hex."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that are not in ``tensors`` because they share memory: alias -> name."""
    relay_id: str
    """The relay that the trainer copied it to."""
    relay_url: str
    relay_boot: str
    at_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A policy version in a relay's memory."""

    version: int
    epoch: int
    chunks_verified: int
    n_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """A relay's heartbeat: topic ``relays.status``, key ``relay_id``."""

    relay_id: str
    boot_id: str
    """New with every start: bytes of another boot are never mixed."""
    url: str
    host: str
    """Machine identity: the same host means that the shared memory below can be mapped."""
    shm_dir: str
    zone: str = ""
    versions: tuple[HeldVersion, ...]
    at_ms: int
