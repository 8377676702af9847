"""Records as JSON for people and tools: token buffers as counts or, when asked for, as lists.

>>> as_json(DrainCommand(rollout_id="rollout-0", incarnation=1, at_ms=2))
{'rollout_id': 'rollout-0', 'incarnation': 1, 'at_ms': 2}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from laminar.schemas.tokens import Tokens, ids_view

__all__ = ["as_json"]

_MAX_BYTES = 256


def as_json(value: Any, *, tokens: bool = False) -> Any:
    """A record, or a part of one, as plain JSON values. ``tokens``: with every token id, logprob and version."""
    if isinstance(value, Tokens):
        return _tokens(value) if tokens else {"n_tokens": value.n_tokens}
    if is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        for field in fields(value):
            item = getattr(value, field.name)
            if field.name == "prompt_tokens":
                if tokens:
                    out[field.name] = ids_view(item).tolist()
            else:
                out[field.name] = as_json(item, tokens=tokens)
        return out
    if isinstance(value, Mapping):
        return {str(key): as_json(item, tokens=tokens) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, tokens=tokens) for item in value]
    if isinstance(value, bytes):
        return value.hex() if len(value) <= _MAX_BYTES else f"{value[:_MAX_BYTES].hex()}... ({len(value)} bytes)"
    return value


def _tokens(value: Tokens) -> dict[str, Any]:
    return {
        "n_tokens": value.n_tokens,
        "ids": value.ids_T.tolist(),
        "logprobs": [round(float(x), 6) for x in value.logprobs_T],
        "versions": value.versions_T.tolist(),
        "mask": value.mask_T.tolist(),
    }
