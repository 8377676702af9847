"""The audit of a run file's run: its groups are named after the operators in the file."""

from __future__ import annotations

from laminar.pipeline.config.models import RunConfig
from laminar.schemas.codec import Codec
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log

__all__ = ["audit_run"]


def audit_run(log: Log, codec: Codec, config: RunConfig, deadline: Deadline) -> Ledger:
    """One fate for every admitted (prompt, member). Raises UnknownTopic, Retryable, DeadlineExceeded."""
    names = {str(getattr(operator, "kind", "")): name for name, operator in config.operators.items()}
    return audit(
        log,
        codec,
        config.name,
        rollout_group=f"{config.name}.{names.get('rollout', 'rollout')}",
        reward_group=f"{config.name}.{names.get('reward', 'reward')}",
        deadline=deadline,
    )
