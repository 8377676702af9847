"""The seam between the trainer's protocol on the log and the arithmetic: the operator sees a Learner, never torch.

``policy.Policy`` is the real one. A test or a simulation may bring its own: anything that turns batches into weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from laminar.operators.trainer.selection import Batch
from laminar.operators.weights import NamedTensor
from laminar.schemas.records import Probe

__all__ = ["Learner"]


class Learner(Protocol):
    """Weights and the state of their optimizer. One step is begin, advance until False, finish."""

    @property
    def identity(self) -> str:
        """What model this is: the same string for every checkpoint that fits into it."""

    def begin(self, batch: Batch, step: int) -> None:
        """Take a batch for optimizer step ``step`` (1 for the first). Nothing changes before finish."""

    def advance(self) -> bool:
        """Work through one micro-batch; False when none is left."""

    def finish(self) -> Mapping[str, float]:
        """Make the optimizer step; return its metrics."""

    def abandon(self) -> None:
        """Forget the batch in hand, as if begin had not been called."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random state into files in ``folder``, which exists and is empty."""

    def load(self, folder: Path) -> None:
        """Read what save wrote. Raises CheckpointError."""

    def tensors(self) -> Iterable[NamedTensor]:
        """The weights to publish, each of them once, in a fixed order."""

    def probes(self) -> tuple[Probe, ...]:
        """What the weights to publish say of a few fixed tokens, for the rollouts' self-check; () says nothing."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that share memory with a published tensor: alias -> name."""
