"""The audit: what became of every admitted (prompt, member), from the topics alone.

All topics are read together, by time, and each record is decoded as far as needed and forgotten. Memory follows what is
in flight: a member with its fate is a byte (``settled``). The result does not depend on the order in which partitions
are read, nor on whether it was read at once or followed (``fold``), and it is sound beside a live system (``auditor``).

>>> ledger = audit(log, codec, "run")                                                # doctest: +SKIP
>>> ledger.balanced, ledger.trained, ledger.dropped
(True, 1024, {'zero_advantage': 96, 'eval': 200})
"""

from __future__ import annotations

from laminar.schemas.codec import Codec
from laminar.streams.audit.auditor import Auditor
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log

__all__ = ["Auditor", "audit"]


def audit(
    log: Log,
    codec: Codec,
    run_id: str,
    *,
    rollout_group: str | None = None,
    reward_group: str | None = None,
    trainer_group: str | None = None,
    max_staleness: int | None = None,
    deadline: Deadline | None = None,
) -> Ledger:
    """The ledger of a run, as of now.

    ``rollout_group``, ``reward_group``, ``trainer_group``: the consumer groups (default ``{run_id}.rollout`` and so
    on); ``max_staleness``: a trajectory that was trained more versions late than this is a violation. Raises
    UnknownTopic, Retryable, DeadlineExceeded.
    """
    auditor = Auditor(
        log,
        codec,
        run_id,
        rollout_group=rollout_group,
        reward_group=reward_group,
        trainer_group=trainer_group,
        max_staleness=max_staleness,
    )
    try:
        return auditor.look(deadline or Deadline.after(600.0, "audit"))
    finally:
        auditor.close()
