"""New groups: as many as fit, at once, in one transaction {Started of each member, offset of the prompts}.

After back-pressure the number in flight is back at its cap with the next call (case A10; what may wait in the engine
is filled up once half of it is free: ``round.fills_up``), and a group larger than the cap is taken when nothing is in
hand (case A13). Bytes that are no prompt become a dead letter in the same transaction, and so does a prompt that is too
large for the lifecycle topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from laminar.operators.operator import Context
from laminar.operators.rollout import event
from laminar.operators.rollout.intake import Intake, Offer
from laminar.operators.rollout.ledger import Owned
from laminar.operators.rollout.round import admits
from laminar.operators.rollout.writer import Outcome, Writer
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, DecodeError, Evicted, RecordTooLarge
from laminar.streams.dead_letter import dead_letter, send_letter
from laminar.streams.log import Membership, OutRecord, TopicPartition, Transaction
from laminar.streams.topics import outgoing

__all__ = ["Admission"]

_KEEP_ALIVE_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Plan:
    """What becomes of one offer: the members that are taken, or a dead letter."""

    offer: Offer
    letter: r.DeadLetter | None = None
    owned: list[Owned] = field(default_factory=list)
    records: list[OutRecord] = field(default_factory=list)


class _Refused(Exception):
    """Leaves a transaction in order to abort it; never seen outside."""

    def __init__(self, index: int, error: RecordTooLarge) -> None:
        super().__init__(str(error))
        self.index = index
        self.error = error


class Admission:
    """See the module's docstring. ``now`` is Unix epoch seconds."""

    def __init__(
        self, context: Context, writer: Writer, *, max_in_flight: int, updates: r.UpdateMode = "pinned"
    ) -> None:
        self._context = context
        self._updates = updates
        self._writer = writer
        self._max_in_flight = max_in_flight
        self._intake = self._join()
        self._next_keep_alive = 0.0
        self._typical_group = max(1, context.run.group_size)
        self.pending = False
        """Groups are being taken beside the step: what becomes of them is not known yet."""

    def take(
        self,
        now: float,
        *,
        in_flight: int,
        incarnation: int,
        version: int,
        engine: str,
        then: Callable[[list[Owned]], None],
    ) -> None:
        """Take what fits, and call ``then`` with its members once that is committed. Not while the writer is busy.

        When the transaction was aborted it is tried again by a later call.
        """
        if self._intake.closed:
            self._intake = self._join()
        chosen = self._choose(in_flight, version)
        if not chosen:
            return
        plan = partial(self._plan, at_ms=int(now * 1000), incarnation=incarnation, version=version, engine=engine)
        self._try(chosen, plan, then)

    def _try(self, chosen: list[Offer], plan: Callable[[Offer], _Plan], then: Callable[[list[Owned]], None]) -> None:
        plans = [plan(offer) for offer in chosen]
        offsets = {one.offer.source.source: one.offer.source.offset + 1 for one in plans}
        membership = self._intake.membership()
        self.pending = True

        def landed(outcome: Outcome) -> None:
            self.pending = False
            try:
                committed = self._conclude(plans, outcome)
            except _Refused as refused:
                chosen[refused.index] = replace(chosen[refused.index], error=refused.error)
                self._try(chosen, plan, then)
            else:
                if committed:
                    then([member for one in plans for member in one.owned])

        self._writer.write(lambda: self._make(plans, membership, offsets), landed)

    def _plan(self, offer: Offer, *, at_ms: int, incarnation: int, version: int, engine: str) -> _Plan:
        if offer.prompt is None or offer.error is not None:
            error = offer.error or DecodeError(f"{offer.source.where}: not a prompt")
            logger.error("%s: dead letter: %s", offer.source.where, error)
            letter = dead_letter(
                offer.source, error, operator=self._context.name, attempt=1, at_ms=at_ms, record=offer.prompt
            )
            return _Plan(offer, letter=letter)
        plan = _Plan(offer, owned=Owned.started(offer.prompt, at_ms=at_ms))
        for member in plan.owned:
            record = event.started(
                member,
                rollout_id=self._context.instance,
                incarnation=incarnation,
                version=version,
                engine=engine,
                updates=self._updates,
            )
            plan.records.append(outgoing(self._context.codec, record))
        return plan

    def keep_alive(self, now: float) -> None:
        """The member's sign of life while no group is fetched."""
        if now >= self._next_keep_alive and not self._intake.closed and not self.pending:
            self._next_keep_alive = now + _KEEP_ALIVE_S
            self._intake.keep_alive()

    def close(self) -> None:
        """Leave the group: its prompts go to other rollouts at once. The next ``take`` joins it again."""
        if self.pending:
            self._writer.land(wait=True)
        self._intake.close()

    def _join(self) -> Intake:
        context = self._context
        return Intake(context.log, context.codec, group=context.group, instance=context.instance)

    def _choose(self, in_flight: int, version: int) -> list[Offer]:
        """The next offers, in order, up to the first that must wait."""
        chosen: list[Offer] = []
        room = self._max_in_flight - in_flight
        if room <= 0:
            return chosen
        for offer in self._intake.offers(max(1, room // self._typical_group)):
            if offer.prompt is not None:
                size = offer.prompt.group_size
                if offer.prompt.min_version > version:
                    break
                if not admits(size, in_flight=in_flight, max_in_flight=self._max_in_flight):
                    break
                in_flight += size
                self._typical_group = size
            chosen.append(offer)
            if in_flight >= self._max_in_flight:
                break
        return chosen if self._intake.holds(chosen) else []

    def _make(self, plans: list[_Plan], membership: Membership, offsets: Mapping[TopicPartition, int]) -> None:
        with self._writer.producer.transaction(visible=False) as tx:
            for index, plan in enumerate(plans):
                self._send(tx, index, plan)
            tx.commit_offsets(membership, offsets)

    def _conclude(self, plans: list[_Plan], outcome: Outcome) -> bool:
        try:
            outcome()
        except Aborted as error:
            logger.warning("groups not taken, trying again: %s", error)
            return False
        except Evicted as error:
            logger.info("groups not taken, they belong to another member: %s", error)
            self._intake.rewind()
            return False
        self._intake.taken(len(plans))
        return True

    def _send(self, tx: Transaction, index: int, plan: _Plan) -> None:
        if plan.letter is not None:
            send_letter(tx, self._context.codec, plan.letter)
            return
        for record in plan.records:
            try:
                tx.send(record)
            except RecordTooLarge as error:
                raise _Refused(index, error) from error
