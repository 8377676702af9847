"""A Learner without arithmetic: its weights are the list of the trajectories that it was trained on.

So a lost step, a doubled one, or weights that are not those of the history can be seen from the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from laminar.operators.trainer.selection import Batch
from laminar.operators.weights import NamedTensor
from laminar.schemas.records import Probe

__all__ = ["ListLearner", "digest_of"]


def digest_of(learnt: Sequence[str]) -> str:
    """Of weights."""
    return hashlib.blake2b("\n".join(learnt).encode(), digest_size=16).hexdigest()


class ListLearner:
    """See the module's docstring."""

    identity = "list/1"
    tied: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.learnt: list[str] = []
        self._batch: Batch | None = None
        self._left = 0

    def begin(self, batch: Batch, step: int) -> None:
        """Take a batch."""
        del step
        self._batch = batch
        self._left = 2

    def advance(self) -> bool:
        """Two micro-batches."""
        self._left -= 1
        return self._left >= 0

    def finish(self) -> Mapping[str, float]:
        """Learn it."""
        assert self._batch is not None
        self.learnt += [sample.trajectory.trajectory_id for sample in self._batch.samples]
        self._batch = None
        return {"loss": 0.0}

    def abandon(self) -> None:
        """Forget it."""
        self._batch = None

    def save(self, folder: Path) -> None:
        """Write the list."""
        (folder / "learner.json").write_text(json.dumps(self.learnt))

    def load(self, folder: Path) -> None:
        """Read the list."""
        self.learnt = json.loads((folder / "learner.json").read_text())

    def tensors(self) -> Iterable[NamedTensor]:
        """The list's digest."""
        data = memoryview(digest_of(self.learnt).encode())
        yield NamedTensor(name="learnt", dtype="U8", shape=(len(data),), data=data)

    def probes(self) -> tuple[Probe, ...]:
        """It computes no logprobs."""
        return ()
