"""Token buffers: what was sampled, with the evidence for each token.

A :class:`Tokens` holds four parallel little-endian buffers of equal length T. They stay ``bytes``, as they are in
Avro, so that a record can be compared, hashed and forwarded without a copy; the properties give numpy views.

Guarantee: a ``Tokens`` that went through :meth:`Tokens.check` has four buffers of the same T, finite logprobs <= 0
wherever the mask is 1, and a version >= 0 for every such token.

>>> t = Tokens.build(ids=[5, 6], logprobs=[-0.5, -1.0], version=3)
>>> t.n_tokens, t.versions_T.tolist()
(2, [3, 3])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laminar.schemas.errors import InvalidRecord

__all__ = ["EMPTY", "Tokens", "ids_buffer", "ids_view"]

_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")
_U8 = np.dtype("u1")
_MIN, _MAX = np.minimum.reduce, np.maximum.reduce
"""As ``min()`` and ``max()`` of an array, without their cost for a short one."""


def ids_buffer(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Token ids, shape (T,), as little-endian int32 bytes."""
    return np.asarray(ids, dtype=_I32).tobytes()


def ids_view(buffer: bytes) -> NDArray[np.int32]:
    """A read-only view, shape (T,) int32, of little-endian token ids."""
    return np.frombuffer(buffer, dtype=_I32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one response, in order, each with its logprob, policy version and loss mask."""

    n_tokens: int
    """T, the number of tokens. Every buffer must have exactly this length."""
    ids: bytes
    """T token ids, int32 little-endian."""
    logprobs: bytes
    """T natural-log probabilities under the distribution that the token was sampled from, float32 little-endian."""
    versions: bytes
    """T policy versions that sampled the token, int32 little-endian."""
    mask: bytes
    """T flags, uint8: 1 = sampled by the policy (trained on), 0 = put there by a tool or an environment."""

    @classmethod
    def build(
        cls,
        *,
        ids: Sequence[int] | NDArray[np.int32],
        logprobs: Sequence[float] | NDArray[np.float32],
        version: int,
    ) -> Tokens:
        """Sampled tokens of a single policy version; the mask is all ones. Raises InvalidRecord."""
        n = len(ids)
        made = cls(
            n_tokens=n,
            ids=np.asarray(ids, dtype=_I32).tobytes(),
            logprobs=np.asarray(logprobs, dtype=_F32).tobytes(),
            versions=np.full(n, version, dtype=_I32).tobytes(),
            mask=np.ones(n, dtype=_U8).tobytes(),
        )
        made.check("tokens")
        return made

    @property
    def ids_T(self) -> NDArray[np.int32]:
        """Read-only view, shape (T,), int32."""
        return np.frombuffer(self.ids, dtype=_I32)

    @property
    def logprobs_T(self) -> NDArray[np.float32]:
        """Read-only view, shape (T,), float32."""
        return np.frombuffer(self.logprobs, dtype=_F32)

    @property
    def versions_T(self) -> NDArray[np.int32]:
        """Read-only view, shape (T,), int32."""
        return np.frombuffer(self.versions, dtype=_I32)

    @property
    def mask_T(self) -> NDArray[np.uint8]:
        """Read-only view, shape (T,), uint8."""
        return np.frombuffer(self.mask, dtype=_U8)

    def __getitem__(self, part: slice) -> Tokens:
        """The tokens of a contiguous slice (step 1)."""
        start, stop, step = part.indices(self.n_tokens)
        if step != 1:
            raise ValueError("Tokens can only be sliced with step 1")
        stop = max(start, stop)
        return Tokens(
            n_tokens=stop - start,
            ids=self.ids[4 * start : 4 * stop],
            logprobs=self.logprobs[4 * start : 4 * stop],
            versions=self.versions[4 * start : 4 * stop],
            mask=self.mask[start:stop],
        )

    @staticmethod
    def concat(parts: Iterable[Tokens]) -> Tokens:
        """All parts in order, as one."""
        taken = list(parts)
        return Tokens(
            n_tokens=sum(p.n_tokens for p in taken),
            ids=b"".join(p.ids for p in taken),
            logprobs=b"".join(p.logprobs for p in taken),
            versions=b"".join(p.versions for p in taken),
            mask=b"".join(p.mask for p in taken),
        )

    def check(self, where: str) -> None:
        """Raise InvalidRecord, naming ``where`` and the field, unless lengths, logprobs and versions are sound."""
        n = self.n_tokens
        if n < 0:
            raise InvalidRecord(f"{where}.n_tokens: {n} is negative")
        for name, buffer, width in (
            ("ids", self.ids, 4),
            ("logprobs", self.logprobs, 4),
            ("versions", self.versions, 4),
            ("mask", self.mask, 1),
        ):
            if len(buffer) != n * width:
                raise InvalidRecord(
                    f"{where}.{name}: {len(buffer)} bytes, but n_tokens={n} needs {n * width} ({width} per token)"
                )
        if n == 0:
            return
        if _MIN(self.ids_T) < 0:
            raise InvalidRecord(f"{where}.ids: negative token id {int(self.ids_T.min())}")
        ones = self.mask.count(1)
        if ones + self.mask.count(0) != n:
            raise InvalidRecord(f"{where}.mask: {int(self.mask_T.max())} is not 0 or 1")
        if not ones:
            return
        sampled = slice(None) if ones == n else np.flatnonzero(self.mask_T)
        logprobs = self.logprobs_T[sampled]
        if not (_MAX(logprobs) <= 0.0 and _MIN(logprobs) > -np.inf):  # NaN fails the first comparison
            at = self._first(sampled, ~(np.isfinite(logprobs) & (logprobs <= 0.0)))
            raise InvalidRecord(
                f"{where}.logprobs: {self.logprobs_T[at]} at token {at}; a logprob is finite and at most 0"
            )
        low, _ = self.version_range() or (0, 0)
        if low < 0:
            at = self._first(sampled, self.versions_T[sampled] < 0)
            raise InvalidRecord(
                f"{where}.versions: {int(self.versions_T[at])} at token {at}; every sampled token carries its version"
            )

    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled a token here; None without sampled tokens."""
        ones = self.mask.count(1)
        if not ones:
            return None
        if ones == self.n_tokens and self.versions == self.versions[:4] * self.n_tokens:  # nearly always
            only = int.from_bytes(self.versions[:4], "little", signed=True)
            return only, only
        versions = self.versions_T if ones == self.n_tokens else self.versions_T[self.mask_T == 1]
        return int(_MIN(versions)), int(_MAX(versions))

    def _first(self, chosen: slice | NDArray[np.intp], bad: NDArray[np.bool_]) -> int:
        """The index of the first token among the chosen ones that is bad."""
        return int(np.arange(self.n_tokens)[chosen][bad][0])


EMPTY = Tokens(n_tokens=0, ids=b"", logprobs=b"", versions=b"", mask=b"")
"""No tokens."""
