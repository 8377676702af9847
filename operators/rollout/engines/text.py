"""Response tokens to text, for an operator whose engine is elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from laminar.operators.operator import ModelConfig
from laminar.operators.tokenizer import load_tokenizer

__all__ = ["Decoder", "decimal", "load_decoder"]

Decoder = Callable[[tuple[int, ...]], str]


def decimal(ids: tuple[int, ...]) -> str:
    """The ids in decimal, with spaces between.

    >>> decimal((7, 8))
    '7 8'
    """
    return " ".join(map(str, ids))


def load_decoder(model: ModelConfig) -> Decoder:
    """The tokenizer of a model folder; special tokens are left out. Raises ConfigError."""
    tokenizer = load_tokenizer(model)

    def decode(ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    return decode
