"""Which trajectory kills its owners: pure decisions, from what the log says of each.

A trajectory may bring down every engine that samples it (a bug that one input reaches, memory that it alone needs).
Adopted again and again, it would bring down one rollout after the other. So owners that died with it in hand, or lost
the engine that it was in, are counted: those in a row that did not bring it a single token further than it had ever
been. (One that gets further under each owner is not what kills them, and will end.) With one death less than
``max_owner_deaths`` it is a *suspect*, and from then on never beside another one: all that died with it before are
suspects as well, and go to different rollouts, or wait. At the next death the suspect is condemned: a dead letter,
which a person may retry.

>>> deaths_by_now(one) >= config.max_owner_deaths                                        # doctest: +SKIP
False
"""

from __future__ import annotations

from laminar.operators.repack.adoption import TAKEN
from laminar.operators.repack.fold import POOL, Alive
from laminar.schemas import records as r

__all__ = ["KIND", "condemn", "deaths_by_now", "is_suspect"]

KIND = "OwnersDied"


def deaths_by_now(orphan: Alive) -> int:
    """Owners that died with it, the present one (which is dead) included."""
    return orphan.deaths_by(dead=True)


def is_suspect(one: Alive, limit: int, *, orphaned: bool = False) -> bool:
    """Whether the death of its next owner (``orphaned``), or of its present one, decides."""
    return one.deaths_by(dead=orphaned) >= limit - 1


def condemn(orphan: Alive, *, operator: str, at_ms: int) -> tuple[r.TrajectoryMoved, r.TrajectoryEnded, r.DeadLetter]:
    """{Moved to nobody, Ended, DeadLetter}: the attempt grows, so what its last owner may still say comes too late."""
    deaths, attempt = deaths_by_now(orphan), orphan.attempt + TAKEN
    rollout, incarnation = orphan.owner
    last = rollout if incarnation == POOL else f"{rollout} (incarnation {incarnation})"
    error = (
        f"{deaths} rollouts died or lost their engine, one after the other, with it in hand and no new token of it, the"
        f" last one {last} after {orphan.n_response} of its tokens"
    )
    moved = r.TrajectoryMoved(
        trajectory_id=orphan.trajectory_id,
        attempt=attempt,
        reason="dead",
        from_rollout=rollout,
        to_rollout=rollout,
        to_incarnation=POOL,
        n_tokens=orphan.n_response,
        at_ms=at_ms,
    )
    ended = r.TrajectoryEnded(
        trajectory_id=orphan.trajectory_id,
        attempt=attempt,
        finish=None,
        error=error,
        n_tokens=orphan.n_response,
        at_ms=at_ms,
    )
    letter = r.DeadLetter(
        operator=operator,
        kind=KIND,
        error=error,
        topic="trajectories.partial",
        partition=-1,
        offset=-1,
        attempt=deaths,
        key=orphan.trajectory_id.encode(),
        value=None,
        group_id=orphan.prompt.prompt_id,
        trajectory_ids=(orphan.trajectory_id,),
        at_ms=at_ms,
    )
    return moved, ended, letter
