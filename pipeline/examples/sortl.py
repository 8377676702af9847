"""``sortl``: put distinct letters in order.

Rows are raw text in JSONL, one token a character: ``{"prompt": "qhe>", "answer": "ehq"}``. The model has the shape of
Qwen2 (2 layers, hidden 64, 2 heads over 1 KV head of size 32, tied embeddings: 76,288 parameters).
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from laminar.pipeline.examples.tokenizer import symbol_tokenizer

__all__ = ["TASK", "Sortl"]

_MAX_LENGTH = 64


class Sortl:
    """See the module's docstring."""

    name = "sortl"
    train_file = "train.jsonl"
    heldout_file = "heldout.jsonl"
    steps = 260

    def sizes(self, rng: np.random.Generator, n: int) -> list[int]:
        """exp(N(2.1, .5)) letters, from 3 to 24."""
        return [int(x) for x in np.clip(np.round(np.exp(rng.normal(2.1, 0.5, n))), 3, 24)]

    def draw(self, rng: np.random.Generator, size: int) -> tuple[str, ...]:
        """``size`` distinct letters in random order."""
        return tuple(string.ascii_lowercase[i] for i in rng.permutation(26)[:size])

    def answer(self, question: tuple[str, ...]) -> tuple[str, ...]:
        """The letters in order."""
        return tuple(sorted(question))

    def prompt_ids(self, tokenizer: Any, question: tuple[str, ...]) -> list[int]:
        """The row's text, tokenized plainly."""
        ids: list[int] = tokenizer(_prompt(question)).input_ids
        return ids

    def answer_ids(self, tokenizer: Any, answer: tuple[str, ...]) -> list[int]:
        """The letters and ``<eos>``."""
        return [*tokenizer.convert_tokens_to_ids(list(answer)), tokenizer.eos_token_id]

    def write_rows(self, path: Path, questions: list[tuple[str, ...]]) -> None:
        """JSONL with ``prompt`` and ``answer``."""
        rows = [{"prompt": _prompt(q), "answer": "".join(self.answer(q))} for q in questions]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def tokenizer(self) -> Any:
        """Characters: the letters and ``>``, which asks for the answer."""
        return symbol_tokenizer([">", *string.ascii_lowercase], separator="", max_length=_MAX_LENGTH)

    def model(self, tokenizer: Any) -> Any:
        """Qwen2 shape."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=_MAX_LENGTH,
                tie_word_embeddings=True,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )


def _prompt(question: tuple[str, ...]) -> str:
    return "".join(question) + ">"


TASK = Sortl()
