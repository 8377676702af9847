"""What the trainer's own forward pass says of a few fixed tokens: goes with each version, for the rollout's self-check.

The sequences depend on the model's vocabulary and length alone, so they are the same for every version: an engine that
kept anything of the version before (KV blocks, prefix cache, a packed output layer) answers with the old numbers. One
is longer than a KV block of 32 tokens, one than a block of 16; no token is one that means something to the tokenizer.

>>> probing = Probing(model)                                                     # doctest: +SKIP
>>> probing.ask(model, device=torch.device("cpu"), autocast=False)[0].logprobs_PK
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laminar.schemas.records import Probe
from laminar.schemas.tokens import ids_buffer

__all__ = ["TOP_K", "Probing"]

TOP_K = 32
"""Next tokens for each prefix, where the vocabulary has so many."""

_SEED = 20251014
_PREFIXES = ((8, 17, 33, 40, 48), (5, 12, 20))
"""Of each sequence, the lengths after which the next tokens are listed; the last is the sequence's own."""

logger = logging.getLogger(__name__)


class Probing:
    """The probes of one model. See the module's docstring."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        rows = int(model.get_input_embeddings().weight.shape[0])
        reserved = _reserved((config, getattr(model, "generation_config", None)))
        added, known = _tokenizer(Path(str(getattr(model, "name_or_path", ""))))
        n_vocab = min(rows, int(config.vocab_size), known or rows)
        allowed = np.setdiff1d(np.arange(n_vocab), sorted(reserved | added))
        if not allowed.size:
            allowed = np.arange(n_vocab)
        longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30) - 1
        draw = np.random.default_rng(_SEED)
        self._top_k = min(TOP_K, int(config.vocab_size))
        self._sequences = [
            (ids[: max(lengths)], lengths)
            for ids, lengths in (
                (draw.choice(allowed, size=prefixes[-1]), [n for n in prefixes if n <= longest])
                for prefixes in _PREFIXES
            )
            if lengths
        ]

    def ask(self, model: Any, *, device: torch.device, autocast: bool) -> tuple[Probe, ...]:
        """One forward pass over all sequences; () when the model gives no numbers (NaN) for one of them."""
        if not self._sequences:
            return ()
        width = max(len(ids) for ids, _ in self._sequences)
        ids_BL = torch.zeros((len(self._sequences), width), dtype=torch.int64)
        for row, (ids, _) in enumerate(self._sequences):
            ids_BL[row, : len(ids)] = torch.from_numpy(ids)
        # A causal model never looks right: rows padded there are exact without a mask, as in ``packing``.
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            logits_BLV = model(input_ids=ids_BL.to(device), use_cache=False).logits
        probes = []
        for row, (ids, lengths) in enumerate(self._sequences):
            at_P = torch.tensor(lengths, device=device) - 1
            logprobs_PK, ids_PK = torch.log_softmax(logits_BLV[row, at_P].float(), dim=-1).topk(self._top_k, dim=-1)
            if not torch.isfinite(logprobs_PK).all():
                logger.warning("no probes go with this version: its logprobs are not all finite")
                return ()
            probes.append(
                Probe(
                    tokens=ids_buffer(ids),
                    lengths=ids_buffer(lengths),
                    top_k=self._top_k,
                    ids=ids_buffer(ids_PK.cpu().numpy()),
                    logprobs=logprobs_PK.clamp_max(0.0).cpu().numpy().astype("<f4").tobytes(),
                    dtype="bfloat16" if autocast else str(logits_BLV.dtype).removeprefix("torch."),
                )
            )
        return tuple(probes)


def _reserved(configs: Iterable[Any]) -> set[int]:
    """Ids that a config gives a meaning: ``eos_token_id`` and the like."""
    found: set[int] = set()
    for config in configs:
        for name, value in (config.to_dict() if config is not None else {}).items():
            if name.endswith("_token_id"):
                found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    return found


def _tokenizer(folder: Path) -> tuple[set[int], int]:
    """Ids of tokens that were added to the vocabulary, and how many ids there are (0: not known)."""
    file = folder / "tokenizer.json"
    if not folder.name or not file.is_file():
        return set(), 0
    plain = json.loads(file.read_text(encoding="utf-8"))
    added = {int(token["id"]) for token in plain.get("added_tokens") or ()}
    vocab = plain["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return added, 1 + max((*ids, *added), default=-1)
