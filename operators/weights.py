"""The seam between weights and those who make or load them: trainer and rollout see these, never a relay.

``operators/relay`` implements both over shared memory and HTTP; tests and the simulator use in-memory ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["NamedTensor", "TensorView", "WeightPublisher", "WeightSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """Read-only bytes of one tensor, valid while the source's context is open."""

    dtype: str
    """safetensors' names: ``F32``, ``BF16``, ..."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major, little-endian. ``torch.frombuffer`` maps it without a copy."""
    path: str = ""
    """A file that this user's other processes on this machine can map while the context is open; empty: none."""
    offset: int = 0
    """Where the bytes begin in that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor to publish."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class WeightPublisher(Protocol):
    """The trainer's side. Its time does not depend on the number of relays or rollouts."""

    def stage(
        self,
        tensors: Iterable[NamedTensor],
        *,
        tied: Mapping[str, str],
        epoch: int,
        version: int,
        parent: int,
        step: int,
        deadline: Deadline,
    ) -> VersionManifest:
        """Copy the tensors into a free slot of the local relay; return the ``prepared`` manifest.

        The trainer writes it to the log, calls seal, and writes it again as ``committed``. Nobody can read the
        slot before seal. Raises DeadlineExceeded or Unavailable, naming the relay.
        """

    def seal(self, manifest: VersionManifest, deadline: Deadline) -> VersionManifest:
        """Make the slot immutable and readable; return the ``committed`` manifest."""


class WeightSource(Protocol):
    """The rollout's side."""

    def open(self, manifest: VersionManifest, deadline: Deadline) -> AbstractContextManager[Mapping[str, TensorView]]:
        """The verified tensors of a committed version by name, from the nearest relay; leased while open.

        Raises Unavailable (no relay has it, or it went away), WeightsMismatch (digests), DeadlineExceeded.
        """

    def fetch(self, newest: VersionManifest) -> VersionManifest | None:
        """Bring the newest version near, without waiting. Called again and again, until ``open`` is.

        The version that ``open`` has at once: ``newest``, or an older one that was on its way when ``newest`` came (a
        transfer that was begun is finished: where versions come faster than transfers end, none would arrive
        otherwise). None: nothing yet. Raises what ``open`` raises when an attempt failed; the next call begins another.
        """
