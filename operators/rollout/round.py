"""The rule of versions and rounds (``pinned``, the paper's), and how many groups fit: pure decisions.

A rollout takes new groups while it holds the newest committed version, or lags it by less than ``top_up_lag``.
Otherwise it lets its round end, or repack empties it; then it loads the newest version and goes on. A version is only
loaded with nothing in the engine, so each trajectory is sampled by one version. Adopted trajectories keep theirs: while
one is parked no group is taken, and once nothing is in the engine the version that it needs is loaded first.

>>> holding = Holding(version=3, newest=4, sampling=0)
>>> takes_groups(holding, top_up_lag=1), version_to_load(holding)
(False, 4)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Holding", "admits", "takes_groups", "version_to_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A rollout, as far as versions go."""

    version: int
    """Policy version in the engine; -1 before the first load."""
    newest: int
    """Newest committed version; -1 = none yet."""
    sampling: int
    """Trajectories in the engine."""
    parked: tuple[int, ...] = ()
    """Versions that adopted trajectories wait for, ascending."""


def takes_groups(holding: Holding, *, top_up_lag: int) -> bool:
    """Whether new groups may be taken under the version held."""
    return holding.version >= 0 and not holding.parked and holding.newest - holding.version < top_up_lag


def version_to_load(holding: Holding) -> int | None:
    """The version to load now; None: stay."""
    if holding.sampling:
        return None
    wanted = holding.parked[0] if holding.parked else holding.newest
    return wanted if wanted not in (-1, holding.version) else None


def admits(group_size: int, *, in_flight: int, max_in_flight: int) -> bool:
    """Whether a group may be taken. One larger than the limit is, when nothing is in hand (case A13)."""
    return in_flight == 0 or in_flight + group_size <= max_in_flight
