"""The rule of versions and rounds, and how many groups fit: pure decisions.

``pinned`` (the paper's): a rollout takes new groups while it holds the newest committed version, or lags it by less
than ``top_up_lag``. Otherwise it lets its round end, or repack empties it; then it loads the newest version and goes
on. A version is only loaded with nothing in the engine, so each trajectory is sampled by one version. Adopted
trajectories keep theirs: while one is parked no group is taken, and once nothing is in the engine the version that it
needs is loaded first.

``in_flight``: the newest version is loaded as soon as its weights are at hand, whatever is in the engine. A trajectory
goes on under any version that is not older than its last token's; so its versions never decrease, and one that comes
from a rollout with newer weights waits. Only answers of an evaluation, which is of one version, hold a load up.

>>> holding = Holding(version=3, newest=4, sampling=0)
>>> takes_groups(holding, top_up_lag=1), version_to_load(holding)
(False, 4)
>>> busy = Holding(version=3, newest=4, sampling=64, updates="in_flight")
>>> takes_groups(busy, top_up_lag=2), version_to_load(busy)
(True, 4)
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.schemas.records import UpdateMode

__all__ = ["Holding", "admits", "fills_up", "may_sample", "takes_groups", "version_to_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A rollout, as far as versions go."""

    version: int
    """Policy version in the engine; -1 before the first load."""
    newest: int
    """Newest committed version; -1 = none yet."""
    sampling: int
    """Trajectories in the engine."""
    answering: int = 0
    """Those of them that are answers of an evaluation."""
    parked: tuple[int, ...] = ()
    """Versions that adopted trajectories wait for, ascending."""
    updates: UpdateMode = "pinned"


def takes_groups(holding: Holding, *, top_up_lag: int) -> bool:
    """Whether new groups may be taken under the version held."""
    if holding.updates == "pinned" and holding.parked:
        return False
    return holding.version >= 0 and holding.newest - holding.version < top_up_lag


def version_to_load(holding: Holding) -> int | None:
    """The version to load now (``in_flight``: once it is at hand); None: stay."""
    if holding.updates == "in_flight":
        return holding.newest if holding.newest > holding.version and not holding.answering else None
    if holding.sampling:
        return None
    wanted = holding.parked[0] if holding.parked else holding.newest
    return wanted if wanted not in (-1, holding.version) else None


def may_sample(updates: UpdateMode, *, held: int, newest_token: int, min_version: int) -> bool:
    """Whether a trajectory may go on under the version held.

    ``newest_token``: version of its last token, -1 before the first; ``min_version``: what its prompt asks for.
    """
    if held < 0:
        return False
    if updates == "pinned" and newest_token >= 0:
        return held == newest_token
    return held >= max(newest_token, min_version)


def fills_up(in_hand: int, *, max_in_flight: int, max_running: int) -> bool:
    """Whether it is worth a transaction to take groups: the engine has room, or half of what may wait in it is free."""
    return in_hand <= max_in_flight - max(0, max_in_flight - max_running) // 2


def admits(group_size: int, *, in_flight: int, max_in_flight: int) -> bool:
    """Whether a group may be taken. One larger than the limit is, when nothing is in hand (case A13)."""
    return in_flight == 0 or in_flight + group_size <= max_in_flight
