"""Settings of the reward operator."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from laminar.operators.operator import OperatorConfig

__all__ = ["RewardConfig"]


class RewardConfig(OperatorConfig):
    """Scores finished trajectories: ``trajectories.completed`` to ``trajectories.scored``."""

    kind: Literal["reward"] = "reward"
    function: str = Field(default="exact", pattern=r"^(exact|number|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")
    """``exact`` (the text is the reference answer), ``number`` (the number in it is), or ``module:function``: a Python
    callable that takes a CompletedTrajectory and returns a number."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function; for ``exact``: strip, ignore_case, require_stop; for ``number``: pick (last,
    first), tolerance, require_stop."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Limit of one call of ``module:function``; then its process is killed and replaced."""
    max_attempts: int = Field(default=2, ge=1)
    """Calls per trajectory before its reward is null (raised, crashed or out of time)."""
    concurrency: int = Field(default=2, ge=1)
    """Processes that run ``module:function``; ``exact`` and ``number`` need none."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    """Limit for such a process to import the function."""
    max_in_hand: int = Field(default=1024, ge=1)
    """Trajectories read and not yet committed."""
    max_in_hand_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """The same in bytes, as encoded, for trajectories that are long. Whatever the backlog, the operator's memory stays
    within three times this (encoded, decoded, scored), and 64 MB for what is read ahead from Kafka."""
    revoke_s: float = Field(default=2.0, ge=0)
    """How long a partition that goes to another process may wait for calls that are running, so that they need not be
    done again."""
    outage_s: float = Field(default=120.0, gt=0)
    """The process ends, for its supervisor, when transactions have failed for so long."""
    on_lost_offsets: Literal["stop", "jump"] = "stop"
    """When retention has removed trajectories before they were scored: ``stop`` with both offsets, or ``jump`` to the
    first one that is left, with an ``OffsetsSkipped`` on ``dead.letters``."""
    on_truncated: Literal["keep", "penalty"] = "keep"
    """What a training trajectory that hit its token limit gets: its reward as it is, or less ``penalty``. (Dropping
    or masking it is the trainer's choice.)"""
    penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward of a truncated trajectory."""
    penalty_tokens: int = Field(default=0, ge=0)
    """Soft penalty: it grows linearly over this many last tokens before the limit (DAPO, equation 13); 0: only a
    truncated trajectory has it."""
    window: int = Field(default=128, ge=1)
    """Trajectories over which the shares below are taken."""
    truncated_alarm: float = Field(default=0.5, ge=0, le=1)
    """Warn when a larger share of a window is truncated."""
    failure_alarm: float = Field(default=0.1, ge=0, le=1)
    """Warn when a larger share of a window has a null reward."""

    @model_validator(mode="after")
    def _attempts_need_room(self) -> RewardConfig:
        if self.max_in_hand < self.concurrency:
            raise ValueError(f"max_in_hand={self.max_in_hand} is below concurrency={self.concurrency}")
        return self
