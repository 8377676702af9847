"""Policy versions: manifests, what the trainer says of them, and the relays that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from laminar.schemas.tokens import ids_view

__all__ = ["HeldVersion", "Probe", "RelayStatus", "TensorEntry", "VersionManifest", "VersionState"]

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
class Probe:
    """A fixed sequence of tokens, and what the trainer's forward pass says may follow some of its prefixes.

    L tokens, P prefixes, K next tokens for each of them; buffers are little-endian.
    """

    tokens: bytes
    """The sequence: L token ids, int32."""
    lengths: bytes
    """The prefixes: P numbers of tokens, int32, each within 1 .. L."""
    top_k: int
    """K."""
    ids: bytes
    """P * K token ids, int32: for each prefix the likeliest next tokens, likeliest first."""
    logprobs: bytes
    """Their P * K natural-log probabilities at temperature 1 without truncation, float32."""
    dtype: str
    """Of the trainer's forward pass: float32, bfloat16."""

    @property
    def tokens_L(self) -> NDArray[np.int32]:
        """Read-only view, shape (L,)."""
        return ids_view(self.tokens)

    @property
    def lengths_P(self) -> NDArray[np.int32]:
        """Read-only view, shape (P,)."""
        return ids_view(self.lengths)

    @property
    def ids_PK(self) -> NDArray[np.int32]:
        """Read-only view, shape (P, K)."""
        return ids_view(self.ids).reshape(-1, self.top_k)

    @property
    def logprobs_PK(self) -> NDArray[np.float32]:
        """Read-only view, shape (P, K)."""
        return np.frombuffer(self.logprobs, dtype="<f4").reshape(-1, self.top_k)


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
    probes: tuple[Probe, ...] = ()
    """What the trainer's own forward pass gives under these weights; empty: it does not say."""


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
