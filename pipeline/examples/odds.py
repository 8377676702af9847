"""``odds``: pick the odd numbers and put them in order.

Rows are chats in Parquet, one token a word: ``messages`` (a system and a user message) and ``answer``, as in
``"31 4 7 12"`` and ``"7 31"``. The model has the shape of Llama (2 layers, hidden 64, 2 heads over 1 KV head of size
32, tied embeddings: 77,312 parameters). As Llama's, the tokenizer puts ``<bos>`` before plain text, and so does the
chat template: rendered chats are tokenized with ``add_special_tokens=False``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from laminar.pipeline.examples.tokenizer import symbol_tokenizer

__all__ = ["TASK", "Odds"]

_MAX_LENGTH = 96
_NUMBERS = 40
_SYSTEM = "odd numbers in order"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Odds:
    """See the module's docstring."""

    name = "odds"
    train_file = "train.parquet"
    heldout_file = "heldout.parquet"
    steps = 260

    def sizes(self, rng: np.random.Generator, n: int) -> list[int]:
        """exp(N(2.5, .4)) numbers, from 4 to 30."""
        return [int(x) for x in np.clip(np.round(np.exp(rng.normal(2.5, 0.4, n))), 4, 30)]

    def draw(self, rng: np.random.Generator, size: int) -> tuple[str, ...]:
        """``size`` distinct numbers below 40 in random order, one odd number at least."""
        drawn = rng.permutation(_NUMBERS)[:size]
        if not (drawn % 2).any():
            drawn[rng.integers(size)] += 1
        return tuple(str(x) for x in drawn)

    def answer(self, question: tuple[str, ...]) -> tuple[str, ...]:
        """The odd ones in order."""
        return tuple(str(x) for x in sorted(int(symbol) for symbol in question) if x % 2)

    def prompt_ids(self, tokenizer: Any, question: tuple[str, ...]) -> list[int]:
        """The row's messages through the chat template."""
        text = tokenizer.apply_chat_template(_messages(question), tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def answer_ids(self, tokenizer: Any, answer: tuple[str, ...]) -> list[int]:
        """The numbers and ``<eos>``."""
        return [*tokenizer.convert_tokens_to_ids(list(answer)), tokenizer.eos_token_id]

    def write_rows(self, path: Path, questions: list[tuple[str, ...]]) -> None:
        """Parquet with ``messages`` (a list of role and content) and ``answer``."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        message = pa.struct([("role", pa.string()), ("content", pa.string())])
        table = pa.table(
            {
                "messages": pa.array([_messages(q) for q in questions], type=pa.list_(message)),
                "answer": pa.array([" ".join(self.answer(q)) for q in questions], type=pa.string()),
            }
        )
        pq.write_table(table, path)

    def tokenizer(self) -> Any:
        """Words: the numbers, and those of the system message."""
        return symbol_tokenizer(
            [*_SYSTEM.split(), *(str(x) for x in range(_NUMBERS))],
            separator=" ",
            more_specials=["<|system|>", "<|user|>", "<|assistant|>"],
            add_bos=True,
            chat_template=_TEMPLATE,
            max_length=_MAX_LENGTH,
        )

    def model(self, tokenizer: Any) -> Any:
        """Llama shape."""
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
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


def _messages(question: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": " ".join(question)}]


TASK = Odds()
