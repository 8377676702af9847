"""A Hugging Face causal LM folder, opened for the torch engine.

Guarantees: nothing is fetched from anywhere but the folder; what cannot be served is a one-line ConfigError; the model
takes its inputs the same way whatever its architecture (``forward``).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from laminar.operators.checkpoint_name import refuse_missing
from laminar.operators.rollout.engines.text import decoder_of
from laminar.schemas.errors import ConfigError

__all__ = ["CausalModel", "resolve_device"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_VALID_DEVICES = "auto, cpu, cuda, cuda:N"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def resolve_device(name: str) -> torch.device:
    """The torch device of this name; ``auto`` is a GPU if there is one.

    Raises ConfigError when torch does not know it or this machine has none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device: unknown {name!r} (valid: {_VALID_DEVICES})") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {name!r} is not supported (valid: {_VALID_DEVICES})")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"engine.device: {name!r}, but torch sees {count} CUDA devices here (valid: auto, cpu)")
    return device


class CausalModel:
    """Model and tokenizer of one folder.

    ``dtype`` is one of float32, bfloat16, float16. Raises ConfigError: no folder, no ``config.json``, no tokenizer, no
    weights, an architecture that is no causal LM or keeps a recurrent state.
    """

    def __init__(self, path: Path, *, dtype: str, device: torch.device, trust_remote_code: bool) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"model.dtype: unknown {dtype!r} (valid: {', '.join(sorted(_DTYPES))})")
        _check_folder(path)
        bars: Any = transformers_logging  # its functions have no annotations
        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, **options)
            self.config: Any = AutoConfig.from_pretrained(path, **options)
            model: Any = AutoModelForCausalLM  # its methods have no annotations
            loaded = model.from_pretrained(path, dtype=_DTYPES[dtype], output_loading_info=True, **options)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ConfigError(f"model.path: {path}: cannot be loaded as a causal LM: {reason}") from error
        finally:
            if shown:
                bars.enable_progress_bar()
        self.decode = decoder_of(self.tokenizer)
        """Text of ids, without special tokens."""
        self.module: Any = loaded[0]
        refuse_missing(path, loaded[1])
        if getattr(self.module, "_is_stateful", False):
            raise ConfigError(
                f"model.path: {path}: {type(self.module).__name__} keeps a recurrent state;"
                " the torch engine serves attention models only (use the vllm engine)"
            )
        self.module.eval()
        self.module.requires_grad_(requires_grad=False)
        self.module.to(device)
        self.device = device
        self.dtype = _DTYPES[dtype]
        text = self.config.get_text_config()
        self.vocab_size = int(self.module.get_input_embeddings().num_embeddings)
        self.n_layers = int(text.num_hidden_layers)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.eos_token_ids = self._eos_token_ids()
        self.takes_prepared_mask = _takes_prepared_mask(self.module, text)
        """True: it uses an additive mask of shape (B, 1, Q, K) as it is; False: it wants (B, K) zeros and ones."""
        accepted = inspect.signature(self.module.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits of the last column, (B, V) float32. ``ids`` and ``positions`` have shape (B, Q)."""
        inputs = {"input_ids": ids, "attention_mask": mask, self._cache_name: cache, **self._options}
        if self._takes_positions:
            inputs["position_ids"] = positions
        logits: Tensor = self.module(**inputs).logits
        return logits[:, -1].float()

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a response according to the folder."""
        found: set[int] = set()
        for source in (self.module.generation_config, self.config, self.tokenizer):
            value = getattr(source, "eos_token_id", None)
            found.update([value] if isinstance(value, int) else value or ())
        return tuple(sorted(found))


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"model.path: {path}: no such folder")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path}: has no config.json, so it is no Hugging Face model folder")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path: {path}: has no tokenizer (needs one of: {', '.join(_TOKENIZER_FILES)})")


def _takes_prepared_mask(module: Any, text_config: Any) -> bool:
    """Whether all layers attend to everything before them, in a model that goes through transformers' own masks."""
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and getattr(text_config, "sliding_window", None) is None
    return bool(module._supports_sdpa) and plain and not getattr(text_config, "alibi", False)
