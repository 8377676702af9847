"""When a rollout writes, and what becomes of it: deltas, ends, moves and heartbeats, in one transaction.

Everything that was decided since the last one goes out together: when a heartbeat is due, when a finished trajectory
has waited for ``finish_s``, or at once when somebody is in a hurry. A log that is slow is written to more rarely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from laminar.operators.operator import Context
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.heartbeat import Heartbeat
from laminar.operators.rollout.work import Work
from laminar.operators.rollout.writer import Outcome, Writer
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, Evicted
from laminar.streams.topics import outgoing

__all__ = ["Outlet"]

_REST = 4.0
"""Sampling goes on for at least so many times as long as the last transaction took, however slow the log is."""

logger = logging.getLogger(__name__)


class Outlet:
    """See the module's docstring.

    ``status``: what a heartbeat says now. ``renewed``: asked right before a transaction is planned, and told the time:
    whether the rollout has become a younger incarnation, which has to say so at once. ``incarnation``: the present one.
    """

    def __init__(
        self,
        config: RolloutConfig,
        context: Context,
        *,
        work: Work,
        writer: Writer,
        heartbeat: Heartbeat,
        status: Callable[[float], r.RolloutStatus],
        renewed: Callable[[float], bool],
        incarnation: Callable[[], int],
    ) -> None:
        self._config = config
        self._context = context
        self._work = work
        self._writer = writer
        self._heartbeat = heartbeat
        self._status = status
        self._renewed = renewed
        self._incarnation = incarnation
        self._hurry = False
        self._next = 0.0

    def hurry(self) -> None:
        """What is in the outbox by the next ``flush`` goes out with it."""
        self._hurry = True

    def flush(self, now: float, *, force: bool = False) -> bool:
        """Write if it is time to; whether anything was written. ``force``: now, everything, and until it is done."""
        work, config = self._work, self._config
        if work.n_fresh >= config.delta_tokens or (work.n_fresh and now - work.fresh_since >= config.delta_s):
            work.stage_deltas(now)
        if force:
            self._writer.land(wait=True)
        elif self._writer.busy:
            return False
        speak = self._heartbeat.is_due(self._context.clock())
        waited = len(work.outbox) > 0 and now - work.outbox.since >= config.finish_s
        urgent = force or (self._hurry and len(work.outbox) > 0)
        if not urgent and (now < self._next or not (speak or waited)):
            return False
        speak = self._renewed(self._context.clock()) or speak
        said = self._status(now) if speak or force else None
        self._hurry = False
        return self._write(said, now, here=force)

    def _write(self, said: r.RolloutStatus | None, now: float, *, here: bool) -> bool:
        """Everything in the outbox, and ``said`` with the last of it; False: nothing was written, and is tried again.

        Beside the step, where the log bears it and unless ``here``: then one transaction, and more with the next step.
        """
        writing = self._work.outbox.begin([] if said is None else [outgoing(self._context.codec, said)])
        if writing is None:
            return True
        producer, wrote, took = self._writer.producer, True, 0.0

        def make() -> None:
            nonlocal took
            began = self._context.clock()
            writing.make(producer)
            took = self._context.clock() - began

        def again() -> None:
            self._hurry = True
            if said is not None:
                self._heartbeat.hurry()

        def landed(outcome: Outcome) -> None:
            nonlocal wrote
            try:
                wrote = self._work.outbox.conclude(writing, outcome)
            except (Aborted, Evicted) as error:
                logger.warning("nothing was written, trying again: %s", error)
                wrote = False
                again()
                return
            finally:
                self._work.bury_refused(now)
            if wrote and writing.is_last:
                self._next = self._context.clock() + _REST * took
                if said is not None and said.incarnation == self._incarnation():
                    self._heartbeat.spoken(now)
            elif here or self._context.background is None:
                wrote = self._write(said, now, here=here)
            else:
                again()

        self._writer.write(make, landed, here=here)
        return wrote
