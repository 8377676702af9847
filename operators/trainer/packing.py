# ruff: noqa: N815 - fields carry their shape as a suffix
"""Micro-batches: which samples share a forward pass, and as which tensors.

Rows are sorted by length and padded on the right. A causal model never looks right, so such rows need no attention
mask and are exact: what follows a row's end cannot change its logits. (Concatenated sequences with restarting
positions are exact too, but cost attention over the whole pack, which is slower for short rows on a CPU.)

>>> micro_batches([9, 3, 4, 3], budget=10)
[[0], [2, 3], [1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laminar.operators.trainer.selection import Sample
from laminar.schemas.tokens import ids_view

__all__ = ["Rows", "micro_batches", "rows"]


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in micro-batches: longest first, rows * longest <= budget.

    A row that is longer than the budget by itself gets a micro-batch of its own. Every index comes up exactly once;
    the order is a function of the lengths alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    width = 0
    for index in order:
        if not batches or (len(batches[-1]) + 1) * width > budget:
            batches.append([])
            width = max(1, lengths[index])
        batches[-1].append(index)
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One micro-batch as arrays. B rows, L tokens (prompt and response), T response positions."""

    input_ids_BL: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    """Token ids of the responses."""
    logits_at_BT: NDArray[np.int64]
    """Position in L whose logits predict the target."""
    sampler_BT: NDArray[np.float32]
    """Logprobs that the sampler drew the targets with."""
    mask_BT: NDArray[np.uint8]
    """1: sampled by the policy; 0: padding, or put there by an environment."""
    advantages_B: NDArray[np.float32]
    temperature_B: NDArray[np.float32]


def rows(samples: Sequence[Sample]) -> Rows:
    """The samples as one padded micro-batch."""
    prompts = [ids_view(s.trajectory.prompt.prompt_tokens) for s in samples]
    responses = [s.trajectory.response for s in samples]
    n = len(samples)
    longest = max(1, *(len(p) + r.n_tokens for p, r in zip(prompts, responses, strict=True)))
    longest_response = max(1, *(r.n_tokens for r in responses))
    input_ids_BL = np.zeros((n, longest), dtype=np.int64)
    targets_BT = np.zeros((n, longest_response), dtype=np.int64)
    logits_at_BT = np.zeros((n, longest_response), dtype=np.int64)
    sampler_BT = np.zeros((n, longest_response), dtype=np.float32)
    mask_BT = np.zeros((n, longest_response), dtype=np.uint8)
    for row, (prompt_P, response) in enumerate(zip(prompts, responses, strict=True)):
        p, t = len(prompt_P), response.n_tokens
        input_ids_BL[row, :p] = prompt_P
        input_ids_BL[row, p : p + t] = response.ids_T
        targets_BT[row, :t] = response.ids_T
        logits_at_BT[row, :t] = np.arange(p - 1, p - 1 + t)
        mask_BT[row, :t] = response.mask_T
        sampler_BT[row, :t] = np.where(response.mask_T != 0, response.logprobs_T, 0.0)
    return Rows(
        input_ids_BL=input_ids_BL,
        targets_BT=targets_BT,
        logits_at_BT=logits_at_BT,
        sampler_BT=sampler_BT,
        mask_BT=mask_BT,
        advantages_B=np.asarray([s.advantage for s in samples], dtype=np.float32),
        temperature_B=np.asarray([_temperature(s) for s in samples], dtype=np.float32),
    )


def _temperature(sample: Sample) -> float:
    """Of the distribution that the sampler's logprobs are about; 1 for greedy sampling, which has none."""
    if sample.trajectory.logprobs_mode == "raw":
        return 1.0
    return sample.trajectory.prompt.sampling.temperature or 1.0
