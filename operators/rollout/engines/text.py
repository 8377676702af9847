"""Response tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from laminar.operators.operator import ModelConfig
from laminar.operators.tokenizer import load_tokenizer

__all__ = ["Decoder", "decimal", "decoder_of", "load_decoder"]

Decoder = Callable[[Sequence[int]], str]


def decimal(ids: Sequence[int]) -> str:
    """The ids in decimal, with spaces between.

    >>> decimal((7, 8))
    '7 8'
    """
    return " ".join(map(str, ids))


def load_decoder(model: ModelConfig) -> Decoder:
    """That of a model folder, for an operator whose engine is elsewhere. Raises ConfigError."""
    return decoder_of(load_tokenizer(model))


def decoder_of(tokenizer: Any) -> Decoder:
    """What a ``transformers`` tokenizer makes of ids; special tokens are left out. For one thread.

    Where it would only ask the tokenizers library, so does this: all else takes three times as long as the decoding.
    """
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    usual = all(
        _method(type(tokenizer), name) is _method(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    if backend is None or not usual or tokenizer.clean_up_tokenization_spaces:

        def decode(ids: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
            return text
    else:

        def decode(ids: Sequence[int]) -> str:
            text: str = backend.decode(ids, skip_special_tokens=True)
            return text

    return decode


def _method(kind: type, name: str) -> Any:
    """As the class has it, but for vLLM, which makes several threads take turns."""
    kinds = (one for one in kind.__mro__ if not one.__module__.startswith("vllm."))
    return next((vars(one)[name] for one in kinds if name in vars(one)), None)
