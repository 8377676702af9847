"""The engine protocol: a few non-blocking calls behind which tokens are sampled.

An engine never sees the log, and the rollout operator never sees an engine's own classes. Three engines (``scripted``,
``torch``, ``vllm``) pass one contract suite:

* ``submit`` queues; tokens come back through ``poll`` in order per trajectory, each token exactly once.
* A delta's logprobs are of the distribution each token was sampled from (after temperature and truncation).
* Resume: a request with ``sampled`` goes on after exactly those tokens, which are not returned again. Greedy resume is
  token-identical; a sampled one draws with seed f(request.seed, tokens so far), so it is reproducible.
* ``load`` may be called between polls with requests running: later tokens carry the new version, the KV cache of
  running requests is recomputed. The rollout operator decides when (``pinned``: only with nothing running).
* An engine in a process of its own can be lost: the call that notices it raises EngineLost, once. Everything in it is
  gone, what was polled before stands. ``version`` is -1 and ``ready`` False until it has started anew, which it does by
  itself, with back-off, while it is polled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from laminar.operators.weights import TensorView
from laminar.schemas.records import FinishReason, Sampling
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Delta", "Engine", "EngineLimits", "EngineRequest", "EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One trajectory to sample, from its start or from a partial."""

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    sampled: Tokens = EMPTY
    """Response tokens so far."""
    sampling: Sampling
    """``max_tokens`` counts the whole response, ``sampled`` included."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one trajectory."""

    trajectory_id: str
    tokens: Tokens
    finish: FinishReason | None = None
    """Set with the last tokens (which may be none)."""
    error: str | None = None
    """Set when sampling this trajectory failed; it is no longer in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine as of now."""

    running: int
    waiting: int
    kv_used: int
    """Tokens."""
    kv_total: int
    preempted: int = 0
    """Since start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take."""

    max_running: int
    """B: sequences decoded together."""
    max_model_len: int
    """Prompt and response tokens of one sequence."""
    kv_total: int
    """Tokens in the KV cache."""


class Engine(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """Engine and its version, recorded in every trajectory, e.g. ``torch-2.13``."""

    @property
    def version(self) -> int:
        """Policy version loaded; -1 before the first load."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed after start."""

    @property
    def ready(self) -> bool:
        """Whether it takes weights and requests. False while it starts anew."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest when it can never be served (naming the limit)."""

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""

    def poll(self, timeout_s: float) -> list[Delta]:
        """Make progress and return new tokens; [] when there is nothing to do."""

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """Take new weights (copied before return). Raises WeightsMismatch before anything was changed."""

    def stats(self) -> EngineStats:
        """Counts as of now."""

    def restart(self, why: str) -> None:
        """Give up everything in it and start anew without weights: raises EngineLost.

        One that lives in the caller's process cannot: it raises Unavailable, so that the process starts anew.
        """

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of response tokens, without special tokens."""

    def close(self) -> None:
        """Free everything."""
