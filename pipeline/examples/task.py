"""What an example task is, and the names of those that exist.

A task draws questions and answers from a random generator, writes rows, and makes its own tokenizer and an untrained
model; ``warmup`` teaches the model a little, ``folder`` writes everything down. (``smollm2`` brings a trained model,
and is no task in this sense.)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from laminar.schemas.errors import ConfigError

__all__ = ["NAMES", "TASKS", "Task", "task"]

TASKS = ("odds", "sortl")
"""Examples with a model of their own, which is warmed up."""
NAMES = ("odds", "smollm2", "sortl")
"""All examples."""


class Task(Protocol):
    """One example: its rows, its tokenizer and the shape of its model. A question is a tuple of symbols."""

    name: str
    train_file: str
    """File name of the training rows."""
    heldout_file: str
    steps: int
    """Longest warm-up, in optimizer steps; the learning rate is planned for it."""

    def draw(self, rng: np.random.Generator, size: int) -> tuple[str, ...]:
        """A question of exactly ``size`` symbols."""

    def sizes(self, rng: np.random.Generator, n: int) -> list[int]:
        """``n`` question sizes: log-normal, clipped."""

    def answer(self, question: tuple[str, ...]) -> tuple[str, ...]:
        """The one right answer, in symbols."""

    def prompt_ids(self, tokenizer: Any, question: tuple[str, ...]) -> list[int]:
        """Token ids of the prompt, exactly as a run makes them from the row."""

    def answer_ids(self, tokenizer: Any, answer: tuple[str, ...]) -> list[int]:
        """Token ids of a response, the end token included."""

    def write_rows(self, path: Path, questions: list[tuple[str, ...]]) -> None:
        """Write one file of rows."""

    def tokenizer(self) -> Any:
        """A fast Hugging Face tokenizer."""

    def model(self, tokenizer: Any) -> Any:
        """An untrained causal LM; its initial weights come from torch's global generator."""


def task(name: str) -> Task:
    """The task of this name. Raises ConfigError, listing the names, when there is none."""
    if name not in TASKS:
        raise ConfigError(f"example: unknown {name!r} (valid: {', '.join(NAMES)})")
    module = importlib.import_module(f"laminar.pipeline.examples.{name}")
    made: Task = module.TASK
    return made
