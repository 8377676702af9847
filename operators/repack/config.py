"""Settings of the repack operator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from laminar.operators.operator import OperatorConfig

__all__ = ["RepackConfig"]


class RepackConfig(OperatorConfig):
    """Moves the long tail of unfinished trajectories on to few rollouts, and adopts those of dead rollouts."""

    kind: Literal["repack"] = "repack"
    enabled: bool = True
    """False: only adopt the trajectories of dead rollouts, never empty a live one."""
    period_s: float = Field(default=5.0, gt=0)
    """Time between plans (the paper: 5 s); a plan is also made right after each new policy version."""
    kv_fraction: float = Field(default=0.9, gt=0, le=1)
    """C_max as a part of a rollout's KV cache: what planned moves may fill."""
    dead_after_s: float = Field(default=10.0, gt=0)
    """A rollout whose heartbeats are missing for this long is dead: its trajectories are adopted."""
    release_timeout_s: float = Field(default=5.0, gt=0)
    """A rollout that was asked to release is left alone for this long, or until its heartbeat shows the effect."""
    version_wait_s: float = Field(default=10.0, ge=0)
    """How long an ownerless trajectory waits for a rollout that can go on under its policy version.

    After that it is sampled again from its prompt, under a newer version.
    """
    max_owner_deaths: int = Field(default=3, ge=2)
    """A trajectory that so many rollouts in a row died with in hand, or lost their engine with, none of which had
    brought it a token further, ends as a dead letter: it may be what kills them. Before the last of them it is given to
    a rollout that holds no other suspect, so that those which were merely beside it are not taken for it."""
