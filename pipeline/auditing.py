"""The audit of a run file's run: its groups are named after the operators in the file.

>>> ledger = audit_run(log, codec, config, Deadline.after(600, "audit"))               # doctest: +SKIP
>>> for look in follow_run(log, codec, config, period_s=2.0, timeout_s=60.0):           # doctest: +SKIP
...     print(look.ledger.trained, look.new)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from laminar.pipeline.config.models import RunConfig
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Retryable
from laminar.streams.audit import Auditor
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger, Violation
from laminar.streams.log import Log

__all__ = ["Look", "audit_run", "follow_run"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run that is followed."""

    ledger: Ledger
    new: tuple[Violation, ...]
    """Violations that the look before did not have."""
    final: bool
    """The run has ended, and this is its ledger."""


def audit_run(log: Log, codec: Codec, config: RunConfig, deadline: Deadline) -> Ledger:
    """One fate for every admitted (prompt, member). Raises UnknownTopic, Retryable, DeadlineExceeded."""
    with closing(_auditor(log, codec, config)) as auditor:
        return auditor.look(deadline)


def follow_run(
    log: Log,
    codec: Codec,
    config: RunConfig,
    *,
    period_s: float,
    timeout_s: float,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Look]:
    """A look every ``period_s``, the last one after the run's end event; at once for a run that is over.

    A log that does not answer is waited for, ``timeout_s`` in all. Raises UnknownTopic, Retryable, DeadlineExceeded,
    OffsetOutOfRange.
    """
    seen: frozenset[Violation] = frozenset()
    ended = False
    with closing(_auditor(log, codec, config)) as auditor:
        patience = Deadline.after(timeout_s, "audit")
        while True:
            try:
                ledger = auditor.look(patience, thorough=ended)
            except Retryable as error:
                if patience.passed:
                    raise
                logger.warning("the log does not answer, looking again: %s", error)
                wait(min(period_s, patience.remaining()))
                continue
            found = frozenset(ledger.violations)
            final = ended and ledger.ended is not None
            yield Look(ledger, tuple(one for one in ledger.violations if one not in seen), final)
            if final:
                return
            seen, ended = found, ledger.ended is not None
            # The end is the last word of the trainer; the others may still be writing theirs. Not if it is history.
            wait(0.0 if ended and auditor.looks == 1 else period_s)
            patience = Deadline.after(timeout_s, "audit")


def _auditor(log: Log, codec: Codec, config: RunConfig) -> Auditor:
    names = {str(getattr(operator, "kind", "")): name for name, operator in config.operators.items()}
    groups = {kind: f"{config.name}.{names.get(kind, kind)}" for kind in ("rollout", "reward", "trainer")}
    return Auditor(
        log,
        codec,
        config.name,
        rollout_group=groups["rollout"],
        reward_group=groups["reward"],
        trainer_group=groups["trainer"],
        max_staleness=config.max_staleness,
    )
