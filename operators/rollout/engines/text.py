"""Response tokens to text, for an operator whose engine is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.operators.operator import ModelConfig
from laminar.schemas.errors import ConfigError

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
    try:
        if (model.path / "tokenizer.json").is_file() and not model.trust_remote_code:
            # The same tokenizer, without importing torch (seconds of start-up).
            from transformers import PreTrainedTokenizerFast

            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model.path, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
            )
    except Exception as error:  # noqa: BLE001 - the tokenizers library has nothing narrower
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path: {model.path} has no usable tokenizer: {why}") from None

    def decode(ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    return decode
