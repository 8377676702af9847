"""Rows to prompt tokens, by the model's own tokenizer and chat template.

>>> encode = PromptTokenizer.load(ModelConfig(path=Path("model")))   # doctest: +SKIP
>>> encode(row).ids
(1, 17, 4)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from laminar.operators.operator import ModelConfig
from laminar.operators.prompts.dataset import Row
from laminar.operators.tokenizer import load_tokenizer
from laminar.schemas.errors import ConfigError

__all__ = ["EncodedPrompt", "PromptTokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    ids: tuple[int, ...]
    text: str
    messages: str | None
    """JSON."""
    template: Literal["chat", "raw"]


class PromptTokenizer:
    """Encodes rows. ``max_model_len`` is the model's context in tokens (None: the model does not say)."""

    def __init__(self, tokenizer: Any, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len

    @classmethod
    def load(cls, model: ModelConfig) -> PromptTokenizer:
        """The tokenizer of a Hugging Face folder. Raises ConfigError."""
        folder = model.path
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {folder} is not a Hugging Face model folder (no config.json in it)")
        tokenizer = load_tokenizer(model)
        described = json.loads((folder / "config.json").read_text())
        limit = described.get("max_position_embeddings")
        return cls(tokenizer, int(limit) if limit else None)

    def __call__(self, row: Row) -> EncodedPrompt:
        """Encode one row. Raises ConfigError (messages, but the tokenizer has no chat template)."""
        if row.messages is None:
            text = row.text or ""
            ids = self._tokenizer(text)["input_ids"]
            return EncodedPrompt(ids=tuple(ids), text=text, messages=None, template="raw")
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{row.where}: the row has messages, but the model's tokenizer has no chat template")
        messages = [dict(m) for m in row.messages]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return EncodedPrompt(ids=tuple(ids), text=text, messages=json.dumps(messages), template="chat")
