"""Drawing the next token of every row at once.

Randomness is a function of (seed, position in the response) and of nothing else: a row gives the same tokens in any
batch, after any preemption, and a trajectory that is resumed elsewhere goes on as if it had not moved. One uniform
number a token, turned into the token by inversion of its distribution.

The distribution is that of vLLM's parameters, applied in its order: temperature, min_p, top_k, top_p. The logprob is of
the distribution the token was drawn from. At temperature 0 the token is the likeliest one and the logprob that of
temperature 1 without truncation, as vLLM gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Draw", "sample", "stream_key", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_U64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How each of B rows is drawn; arrays of shape (B,)."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """0 = all."""
    min_p: NDArray[np.float32]


def stream_key(seed: int) -> int:
    """The key of a request's random stream. Near seeds give unrelated streams."""
    return int(_mix(np.array([(seed & _U64) ^ 0x6C616D696E6172], dtype=np.uint64) * _GAMMA)[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1 - 2**-52], one for each (key, position), both of shape (B,): SplitMix64 at an index."""
    mixed = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: Tensor, draw: Draw, uniform: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Draw one token a row from ``logits`` (B, V) float32: ids (B,) int64 and logprobs (B,) float32."""
    temperature = draw.temperature
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = np.where(greedy, np.float32(1), temperature)
        logits = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    if (draw.top_p < 1).any() or draw.top_k.any() or draw.min_p.any():
        logits = _truncate(logits, draw, greedy)
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        ids = logits.argmax(dim=-1)
    else:
        # Float64, so that the sum over a large vocabulary still resolves its smallest terms.
        cumulated = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        wanted = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulated[:, -1:]
        ids = torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _truncate(logits: Tensor, draw: Draw, greedy: NDArray[np.bool_]) -> Tensor:
    """Set to -inf what min_p, top_k and top_p cut off. Each row keeps at least its likeliest token."""
    device = logits.device
    top_p = torch.from_numpy(np.where(greedy, np.float32(1), draw.top_p)).to(device)[:, None]
    top_k = torch.from_numpy(np.where(greedy | (draw.top_k == 0), logits.shape[1], draw.top_k)).to(device)[:, None]
    min_p = torch.from_numpy(np.where(greedy, np.float32(0), draw.min_p)).to(device)[:, None]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=device)
    kept = (ordered - ordered[:, :1] >= min_p.log()) & (rank < top_k)
    kept[:, 0] = True
    ordered = ordered.masked_fill(~kept, -torch.inf)
    chances = ordered.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    kept &= (before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(~kept, -torch.inf))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
