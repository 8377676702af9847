"""An engine that takes one version's number and keeps the weights that it has, once, whoever starts it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.weights import TensorView

__all__ = ["WRONG", "WrongOnce"]

WRONG = 2
"""The version."""


class WrongOnce(TorchEngine):
    """See the module's docstring. ``mark``: a file that says that it has been."""

    def __init__(self, path: str, mark: str) -> None:
        super().__init__(path, max_running=8, steps_per_poll=2, eos_token_ids=())
        self._mark = Path(mark)

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """See Engine.load."""
        if version == WRONG and not self._mark.exists():
            self._mark.touch()
            self._version = version
        else:
            super().load(weights, version)
