"""The decisions of repack, as pure functions: the operator and the simulator import the same ones.

``plan`` is Algorithm 1 of the paper (arXiv 2510.12633) with its traps mended:

* "no request is waiting" marks a rollout in ramp-down, not "its KV use fell": long stragglers make the KV use grow.
* A rollout chosen as a destination is never emptied as a source in the same plan: its planned load cannot go astray.
* Status is up to a heartbeat old: rollouts with a move under way are left out (``busy``), and the destination checks
  the fit again.

Rollouts that take new weights in flight are in no plan: what emptying one is for, new weights and a full batch, they
have without it. An orphan goes on with any of them that holds its version or a newer one.

Guarantees of a plan: no rollout is both source and destination; each source has one destination of the same policy
version; the planned KV use and batch of each destination stay within its limits.

>>> a = Load("a", 1, version=3, kv_used=10, kv_max=100, running=1, waiting=0, max_running=8)
>>> b = Load("b", 1, version=3, kv_used=40, kv_max=100, running=4, waiting=0, max_running=8)
>>> plan([a, b])
(Move(source='a', destination='b'),)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Load", "Move", "Orphan", "Placement", "place", "plan"]

_MAX_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """A live rollout as its last heartbeat shows it."""

    rollout_id: str
    incarnation: int
    version: int
    """Policy version held."""
    kv_used: int
    """Tokens."""
    kv_max: int
    """C_max in tokens."""
    running: int
    waiting: int
    max_running: int
    """B, the batch limit."""
    in_flight: bool = False
    """It takes new weights under what it samples."""

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Move:
    """Empty ``source`` on to ``destination``."""

    source: str
    destination: str


def plan(loads: Iterable[Load], busy: Collection[str] = ()) -> tuple[Move, ...]:
    """Which rollouts to empty on to which others (Algorithm 1, best fit). ``busy`` rollouts take no part."""
    groups: dict[int, list[Load]] = {}
    for load in loads:
        ramping_down = load.waiting == 0 and 0 < load.running < load.max_running and load.kv_used < load.kv_max
        if ramping_down and not load.in_flight and load.rollout_id not in busy:
            groups.setdefault(load.version, []).append(load)
    moves: list[Move] = []
    for version in sorted(groups):
        moves.extend(_plan_group(groups[version]))
    return tuple(moves)


def _plan_group(candidates: Sequence[Load]) -> list[Move]:
    ordered = sorted(candidates, key=lambda load: (load.kv_used, load.rollout_id))
    planned_kv = {load.rollout_id: load.kv_used for load in ordered}
    planned_n = {load.rollout_id: load.running for load in ordered}
    emptied: set[str] = set()
    filled: set[str] = set()
    moves: list[Move] = []
    for source in ordered:
        if source.rollout_id in filled:
            continue
        fitting = [
            d
            for d in ordered
            if d.rollout_id != source.rollout_id
            and d.rollout_id not in emptied
            and planned_kv[d.rollout_id] + source.kv_used <= d.kv_max
            and planned_n[d.rollout_id] + source.running <= d.max_running
        ]
        if not fitting:
            continue
        best = max(fitting, key=lambda d: (planned_kv[d.rollout_id], d.rollout_id))
        planned_kv[best.rollout_id] += source.kv_used
        planned_n[best.rollout_id] += source.running
        emptied.add(source.rollout_id)
        filled.add(best.rollout_id)
        moves.append(Move(source.rollout_id, best.rollout_id))
    return moves


@dataclass(frozen=True, slots=True)
class Orphan:
    """A trajectory whose owner is dead."""

    trajectory_id: str
    version: int
    """Policy version of its last token; -1 when it has none yet and so may go anywhere."""
    n_tokens: int
    """Prompt and response tokens."""
    waited_s: float
    """Since it was found without an owner."""
    refused: int
    """How often it was handed back since its last token."""
    suspect: bool = False
    """Owner after owner died with it in hand; the next death decides."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Give the orphan to this rollout."""

    trajectory_id: str
    rollout_id: str
    keep_tokens: bool
    """False: no version that may go on with it is to be had any more; it is sampled again from its prompt."""


def place(
    orphans: Iterable[Orphan], loads: Sequence[Load], *, version_wait_s: float, guarded: Collection[str] = ()
) -> tuple[Placement, ...]:
    """Where orphans go: a rollout of their version; an idle one, which can load it; after a wait, anywhere, anew.

    Where weights change in flight, a rollout of their version or a newer one is as good. One that was handed back time
    and again (nobody with its version can hold it) is sampled anew too. Orphans that have to wait are not in the
    result. Longest first, each to the rollout with the fewest requests. A suspect goes only to a rollout that holds no
    other suspect (those that do are ``guarded``).
    """
    suspects = set(guarded)
    requests = {load.rollout_id: load.requests for load in loads}
    version = {load.rollout_id: load.version for load in loads}
    placements: list[Placement] = []
    for orphan in sorted(orphans, key=lambda o: (-o.n_tokens, o.trajectory_id)):
        pinned = orphan.version >= 0
        able = [
            load
            for load in loads
            if not pinned
            or version[load.rollout_id] == orphan.version
            or (
                version[load.rollout_id] > orphan.version
                if load.in_flight
                else requests[load.rollout_id] == 0 and orphan.refused == 0
            )
        ]
        keep = True
        if orphan.refused >= _MAX_REFUSALS or (not able and orphan.waited_s >= version_wait_s):
            able, keep = list(loads), False
        if orphan.suspect:
            able = [load for load in able if load.rollout_id not in suspects]
        if not able:
            continue
        same = [load for load in able if load.in_flight or version[load.rollout_id] == orphan.version]
        best = min(same or able, key=lambda load: (requests[load.rollout_id] / load.max_running, load.rollout_id))
        requests[best.rollout_id] += 1
        if orphan.suspect:
            suspects.add(best.rollout_id)
        if pinned and keep and not best.in_flight:
            version[best.rollout_id] = orphan.version
        placements.append(Placement(orphan.trajectory_id, best.rollout_id, keep))
    return tuple(placements)
