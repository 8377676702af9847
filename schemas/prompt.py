"""Prompts: one group to sample, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Prompt", "Purpose", "Sampling", "group_id_of", "trajectory_id"]

Purpose = Literal["train", "eval"]


def trajectory_id(prompt_id: str, member: int) -> str:
    """The id of one member of a group."""
    return f"{prompt_id}/{member}"


def group_id_of(trajectory: str) -> str:
    """The group id (= prompt id) of a trajectory id."""
    return trajectory.rsplit("/", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How each token of a trajectory is drawn. Names and meaning are vLLM's."""

    max_tokens: int
    """Limit on response tokens, counted over the whole trajectory however often it moved."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One group to sample: topic ``prompts``, key ``prompt_id``."""

    prompt_id: str
    dataset: str
    """Fingerprint of the dataset: the same rows always give the same ids."""
    epoch: int
    """Pass over the data; for ``purpose="eval"`` the evaluation round."""
    index: int
    """Row in the dataset."""
    purpose: Purpose
    task: str
    group_size: int
    prompt_tokens: bytes
    """int32 little-endian, shape (P,)."""
    n_prompt_tokens: int
    prompt_text: str
    messages: str | None = None
    """The chat messages as JSON, when the row had messages."""
    template: Literal["chat", "raw"] = "raw"
    """Whether the tokenizer's chat template made the prompt."""
    reference: str | None = None
    """The reference answer for the reward."""
    sampling: Sampling
    seed: int
    """Base seed of the group; a member's seed is derived from it, the member and the tokens so far."""
    min_version: int = 0
    """The group may only be started by a rollout that holds this policy version or a newer one."""
    round_size: int = 0
    """For ``purpose="eval"``: how many prompts this evaluation round has; 0 for training."""
    created_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)
