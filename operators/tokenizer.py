"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

from typing import Any

from laminar.operators.operator import ModelConfig
from laminar.schemas.errors import ConfigError

__all__ = ["load_tokenizer"]


def load_tokenizer(model: ModelConfig) -> Any:
    """A ``transformers`` tokenizer, from the folder alone. Raises ConfigError."""
    try:
        if (model.path / "tokenizer.json").is_file() and not model.trust_remote_code:
            # The same tokenizer, without importing torch (seconds of start-up).
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(model.path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # noqa: BLE001 - the tokenizers library has nothing narrower
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path: {model.path} has no usable tokenizer: {why}") from None
