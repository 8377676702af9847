"""The folder an example is written to: rows, ``model/``, and ``example.json``, which says what it is.

An example appears whole or not at all: it is made beside its folder and moved there at the end. A finished one is left
alone, and a folder with anything else in it is refused.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from laminar.pipeline.examples.task import Task, task
from laminar.schemas.errors import ConfigError

__all__ = ["ExampleFolder", "write"]

_log = logging.getLogger(__name__)
_MARKER = "example.json"
_TRAIN_ROWS = 4096
_HELDOUT_ROWS = 256

_Maker = Callable[[Path, int, Callable[[str], None]], float | None]
"""Fills a folder from a seed, saying how far it is; returns the accuracy, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFolder:
    """A written example."""

    name: str
    directory: Path
    seed: int
    accuracy: float | None
    """Expected accuracy of a response sampled at temperature 1, on the held-out rows; None: was not measured."""
    created: bool
    """False: it was already there and was left alone."""

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.directory / "model"


def write(
    name: str,
    directory: Path,
    *,
    seed: int = 0,
    force: bool = False,
    say: Callable[[str], None] = _log.info,
) -> ExampleFolder:
    """Write example ``name`` into ``directory`` (10 to 20 CPU-seconds); ``say`` gets progress, one line at a time.

    ``force`` makes a finished example anew. Raises ConfigError for an unknown name, a package that is missing, or a
    folder that holds something else or the same example with another seed.
    """
    make = _maker(name)
    if seed < 0:
        raise ConfigError(f"example: seed {seed} is negative")
    there = _existing(directory)
    if there is not None and not force:
        if (there.name, there.seed) != (name, seed):
            raise ConfigError(
                f"{directory}: already holds example {there.name!r} with seed {there.seed},"
                f" not {name!r} with seed {seed} (choose another folder, or force)"
            )
        say(f"{name}: already in {directory}, left as it is")
        return there
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error
    try:
        accuracy = make(scratch, seed, say)
        accuracy = None if accuracy is None else round(accuracy, 4)
        facts = {"name": name, "seed": seed, "accuracy": accuracy}
        (scratch / _MARKER).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if there is not None:
            shutil.rmtree(directory)
        try:
            scratch.rename(directory)
        except OSError as error:
            raise ConfigError(f"{directory}: was filled by somebody else meanwhile") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    known = "" if accuracy is None else f", sampled accuracy {accuracy:.2f} on {_HELDOUT_ROWS} held-out rows"
    say(f"{name}: written to {directory}{known}")
    return ExampleFolder(name=name, directory=directory, seed=seed, accuracy=accuracy, created=True)


def _maker(name: str) -> _Maker:
    """What fills the folder. Raises ConfigError for an unknown name."""
    if name == "smollm2":
        from laminar.pipeline.examples import smollm2

        return smollm2.make
    return partial(_warmed_up, task(name))


def _existing(directory: Path) -> ExampleFolder | None:
    """The example in ``directory``; None when the folder is empty or missing. Raises ConfigError for anything else."""
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is a file; an example needs a folder")
    if not any(directory.iterdir()):
        return None
    try:
        facts = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        return ExampleFolder(directory=directory, created=False, **facts)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{directory}: is not empty and is no example (choose an empty or new folder)") from error


def _warmed_up(made: Task, directory: Path, seed: int, say: Callable[[str], None]) -> float:
    import torch

    from laminar.pipeline.examples.warmup import warm_up

    rng = np.random.default_rng([seed, 0])
    heldout, train = _rows(made, rng)
    made.write_rows(directory / made.heldout_file, heldout)
    made.write_rows(directory / made.train_file, train)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a matrix of this size is slower on two
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = made.tokenizer()
            model = made.model(tokenizer)
            size = sum(p.numel() for p in model.parameters())
            say(f"{made.name}: warming up a model of {size:,} parameters, up to {made.steps} steps")
            accuracy = warm_up(made, tokenizer, model, np.random.default_rng([seed, 1]), heldout, say)
    finally:
        torch.set_num_threads(threads)
    _without_progress_bar(lambda: model.save_pretrained(directory / "model"))
    tokenizer.save_pretrained(directory / "model")
    for file in (directory / "model").iterdir():
        file.chmod(0o644)
    return accuracy


def _without_progress_bar(act: Callable[[], object]) -> None:
    from transformers.utils import logging as hf

    bars: Any = hf  # its functions have no annotations
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        act()
    finally:
        if shown:
            bars.enable_progress_bar()


def _rows(made: Task, rng: np.random.Generator) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Held-out and training questions, no question twice."""
    seen: dict[tuple[str, ...], None] = {}
    while len(seen) < _HELDOUT_ROWS + _TRAIN_ROWS:
        for size in made.sizes(rng, _HELDOUT_ROWS):
            seen.setdefault(made.draw(rng, size))
    questions = list(seen)
    return questions[:_HELDOUT_ROWS], questions[_HELDOUT_ROWS : _HELDOUT_ROWS + _TRAIN_ROWS]
