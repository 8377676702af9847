"""Advantages: what a member's reward says beside its group's.

>>> group_advantages([1.0, 0.0, 0.0, 0.0])
[0.75, -0.25, -0.25, -0.25]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["group_advantages"]

_EPS = 1e-6


def group_advantages(rewards: Sequence[float], *, scale_by_std: bool = False) -> list[float]:
    """A = R - mean(R), over the members that have a reward; GRPO (arXiv 2402.03300, section 4.1.2).

    ``scale_by_std`` divides by the population standard deviation (plus 1e-6). Without it the estimate is unbiased in
    the group's difficulty (Dr. GRPO, arXiv 2503.20783). A group of equal rewards has exactly 0 everywhere.
    """
    if not rewards:
        return []
    rewards_N = np.asarray(rewards, dtype=np.float64)
    if (rewards_N == rewards_N[0]).all():
        return [0.0] * len(rewards)
    centred_N = rewards_N - rewards_N.mean()
    if scale_by_std:
        centred_N = centred_N / (rewards_N.std() + _EPS)
    return [float(a) for a in centred_N]
