"""Reward functions: from a finished trajectory to a number. Pure.

A function of one's own has the same shape, and is named in the run file as ``module:function``::

    def shorter(trajectory: CompletedTrajectory, *, per_token: float = 0.01) -> float:
        return 1.0 - per_token * trajectory.response.n_tokens

It may return a number, a :class:`Score` (with components, or with a failure), or None: it cannot tell. An exception
is a failure too. A failure is never a reward of 0: it is recorded as null and stays out of every advantage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from laminar.schemas.records import CompletedTrajectory

__all__ = ["BUILT_IN", "RewardFunction", "Score", "exact", "number", "number_in", "score_of", "truncation_penalty"]

_NUMBER = re.compile(
    r"(?:(?<![\w.])[-+\u2212])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?:\.[0-9]+)?"
)
_MARKED = re.compile(r"####|\\boxed\{")
_MOST_DIGITS = 100


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


def number(
    trajectory: CompletedTrajectory,
    *,
    pick: Literal["last", "first"] = "last",
    tolerance: float = 0.0,
    require_stop: bool = True,
) -> Score:
    """1 if the number in the text is the reference answer, else 0, also where there is none.

    The number is the first one after the last ``####`` or ``\\boxed{``; without such a mark the ``last`` one of the
    text, or the ``first``. ``12``, ``+12``, ``12.0``, ``$12``, ``12.`` and ``**12**`` are one number, ``1,250`` and
    ``1250`` are one, a minus counts that no letter, digit or point stands before (``9-3`` ends in 3). No words,
    fractions or powers.
    ``tolerance``: how far it may lie off. ``require_stop``: a truncated answer is never right. Without a reference
    answer that is a number there is no reward.
    """
    given, whose = trajectory.prompt.reference, trajectory.prompt.prompt_id
    if given is None:
        return Score(reward=None, failure=f"{whose} has no reference answer")
    reference = number_in(given)
    if reference is None:
        return Score(reward=None, failure=f"{whose}: the reference answer {given[:40]!r} is no number")
    found = number_in(trajectory.text, pick=pick)
    right = found is not None and abs(found - reference) <= Decimal(tolerance)
    finished = trajectory.finish == "stop" or not require_stop
    return Score(reward=float(right and finished), components={"number_found": float(found is not None)})


def number_in(text: str, *, pick: Literal["last", "first"] = "last") -> Decimal | None:
    """The number that a text gives as its answer; None: it has none (see ``number``).

    >>> number_in("17 + 5 = 22."), number_in("17 + 5", pick="first"), number_in("so #### 1,250 of 9")
    (Decimal('22'), Decimal('17'), Decimal('1250'))
    """
    marks = [mark.end() for mark in _MARKED.finditer(text)]
    if marks and (marked := _NUMBER.search(text, marks[-1])):
        return _decimal(marked[0])
    found: str | None = None
    for match in _NUMBER.finditer(text):
        found = match[0]
        if pick == "first":
            break
    return None if found is None else _decimal(found)


def _decimal(digits: str) -> Decimal | None:
    """What was matched, as a number; None for one that is too long to be meant."""
    if len(digits) > _MOST_DIGITS:
        return None
    return Decimal(digits.replace(",", "").replace("\u2212", "-"))


BUILT_IN: Mapping[str, Callable[..., Score]] = {"exact": exact, "number": number}
"""By the names that a run file may say; they run in the operator's own process."""


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
