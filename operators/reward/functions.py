"""Reward functions: from a finished trajectory to a number. Pure.

A function of one's own has the same shape, and is named in the run file as ``module:function``::

    def shorter(trajectory: CompletedTrajectory, *, per_token: float = 0.01) -> float:
        return 1.0 - per_token * trajectory.response.n_tokens

It may return a number, a :class:`Score` (with components, or with a failure), or None: it cannot tell. An exception
is a failure too. A failure is never a reward of 0: it is recorded as null and stays out of every advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from laminar.schemas.records import CompletedTrajectory

__all__ = ["RewardFunction", "Score", "exact", "score_of", "truncation_penalty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function found out."""

    reward: float | None
    failure: str | None = None
    """Why the reward is None."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, for reports."""
    meta: Mapping[str, str] = field(default_factory=dict)


RewardFunction = Callable[..., object]
"""``(trajectory, **options) -> float | Score | None``."""


def exact(
    trajectory: CompletedTrajectory, *, strip: bool = True, ignore_case: bool = False, require_stop: bool = True
) -> Score:
    """1 if the text equals the reference answer, else 0.

    ``strip``: without the white space around both; ``require_stop``: a truncated answer is never right. Without a
    reference answer there is no reward.
    """
    reference, text = trajectory.prompt.reference, trajectory.text
    if reference is None:
        return Score(reward=None, failure=f"{trajectory.prompt.prompt_id} has no reference answer")
    if strip:
        reference, text = reference.strip(), text.strip()
    if ignore_case:
        reference, text = reference.casefold(), text.casefold()
    finished = trajectory.finish == "stop" or not require_stop
    return Score(reward=float(finished and text == reference))


def score_of(value: object) -> Score:
    """What a function returned, as a Score; anything that is no finite number is a failure."""
    if isinstance(value, Score):
        if value.reward is None:
            return Score(
                reward=None,
                failure=value.failure or "the reward function returned no reward",
                components=value.components,
                meta=value.meta,
            )
        number = score_of(value.reward)
        return Score(reward=number.reward, failure=number.failure, components=value.components, meta=value.meta)
    if value is None:
        return Score(reward=None, failure="the reward function returned None")
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return Score(reward=None, failure=f"the reward function returned {type(value).__name__}, not a number")
    if not math.isfinite(reward):
        return Score(reward=None, failure=f"the reward function returned {reward}")
    return Score(reward=reward)


def truncation_penalty(trajectory: CompletedTrajectory, *, penalty: float, penalty_tokens: int) -> float:
    """What to subtract for length: 0 .. ``penalty``.

    With ``penalty_tokens`` = c > 0 and L the token limit, the soft overlong punishment of DAPO (arXiv 2503.14476,
    equation 13): 0 up to L - c tokens, then linear, ``penalty`` at L and for every truncated trajectory.
    """
    if trajectory.finish == "length":
        return penalty
    if penalty_tokens == 0:
        return 0.0
    over = trajectory.response.n_tokens - (trajectory.prompt.sampling.max_tokens - penalty_tokens)
    return penalty * min(1.0, max(0.0, over / penalty_tokens))
