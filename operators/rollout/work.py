"""The trajectories in hand: into the engine, out of it, and into the outbox. It knows nothing of the log.

Guarantees:

* Each token that the engine returned is written once: as a delta, or with the finished trajectory, or dropped because
  it is unsound (a NaN logprob), in which case the trajectory is sampled again from the last sound token.
* A trajectory that fails ``member_attempts`` times, or that the engine can never serve, ends in one transaction
  {Ended(finish=None), DeadLetter}.
* A trajectory that is handed over leaves with everything sampled: {delta, Moved, Adopt} to a live rollout, {delta,
  Moved} to the pool.
* An engine call that raises EngineLost never leaves a trajectory half-way: what the call was for goes on without the
  engine's answer, nothing is in the engine any more, and ``lost`` says so until ``give_up`` has handed over everything
  in hand.

Handing back: an adopted trajectory that does not fit (the engine's limits; for a planned move also the KV cache and the
batch) goes to the pool, that is, ``Moved(reason=handback)`` to incarnation 0 of the rollout that it came from. No
process has this incarnation, so repack finds it without an owner and places it anew; the source may be busy or gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from laminar.operators.rollout import event
from laminar.operators.rollout.engine import Delta, Engine, EngineRequest, EngineStats
from laminar.operators.rollout.ledger import Ledger, Owned
from laminar.operators.rollout.outbox import Outbox
from laminar.operators.rollout.round import may_sample
from laminar.schemas import records as r
from laminar.schemas.errors import EncodeError, EngineLost, InvalidRecord, InvalidRequest
from laminar.streams.dead_letter import shortened
from laminar.streams.topics import Encoder, outgoing

__all__ = ["Work"]

logger = logging.getLogger(__name__)


class Work:
    """See the module's docstring. ``now`` is Unix epoch seconds."""

    def __init__(
        self,
        *,
        engine: Engine,
        codec: Encoder,
        rollout_id: str,
        operator: str,
        member_attempts: int,
        updates: r.UpdateMode = "pinned",
    ) -> None:
        self.ledger = Ledger()
        self.outbox = Outbox()
        self.fresh_since = 0.0
        """When the oldest fresh token came."""
        self.n_fresh = 0
        """Fresh tokens of all trajectories since the last deltas; those that left otherwise count until then."""
        self.lost: EngineLost | None = None
        """The engine was lost, and what was in hand is still here."""
        self._fallen: set[str] = set()
        """What was being sampled when it was lost."""
        self._engine = engine
        self._codec = codec
        self._rollout_id = rollout_id
        self._operator = operator
        self._member_attempts = member_attempts
        self._updates = updates

    # -- in

    def begin(self, owned: Owned, now: float) -> None:
        """Hand one to the engine, or park it until the engine holds a version that it may go on under."""
        self.ledger.add(owned)
        held = self._engine.version
        least = owned.prompt.min_version
        if not may_sample(self._updates, held=held, newest_token=owned.version, min_version=least):
            return
        request = EngineRequest(
            trajectory_id=owned.trajectory_id,
            prompt_ids=owned.prompt_ids,
            sampled=owned.response(),
            sampling=owned.prompt.sampling,
            seed=owned.seed,
        )
        try:
            self._engine.submit(request)
        except InvalidRequest as error:
            self._bury(owned, type(error).__name__, str(error), now)
        except EngineLost as error:
            self.engine_lost(error)
        else:
            owned.in_engine = True

    def begin_parked(self, now: float) -> None:
        """A version was loaded: hand over those that waited for it."""
        for owned in self.ledger:
            if not owned.in_engine:
                self.begin(owned, now)

    def make_room(self, n: int, now: float) -> bool:
        """Take the youngest out of an engine that is too full to answer ``n`` more requests soon (an eighth of its
        batch is room enough). Whether any was taken: ``begin_parked`` puts them back."""
        limits, stats = self._engine.limits, self.stats()
        wanted = min(n, max(1, limits.max_running // 8)) - (limits.max_running - stats.running - stats.waiting)
        if not n or wanted <= 0:
            return False
        youngest = [owned for owned in self.ledger if owned.in_engine][::-1]
        for owned in youngest[:wanted]:
            self._withdraw(owned, now)
        return bool(youngest)

    def adopt(self, command: r.AdoptCommand, now: float, *, accept: bool) -> None:
        """Go on with a trajectory, or hand it back. Duplicates and older attempts are ignored."""
        snapshot = command.snapshot
        if self.ledger.is_void(snapshot.trajectory_id, snapshot.attempt):
            logger.info("%s: Adopt of attempt %d is void", snapshot.trajectory_id, snapshot.attempt)
            return
        mine = self.ledger.get(snapshot.trajectory_id)
        if mine is not None:
            self._forget(mine, snapshot.attempt - 1)
        owned = Owned.adopted(snapshot)
        if accept and self._fits(owned, command.reason):
            self.begin(owned, now)
        else:
            logger.info("%s: handed back", owned.trajectory_id)
            reason: r.MoveReason = "handback" if self._engine.ready else "drain"
            self._leave(owned, reason, command.from_rollout, event.POOL, now)

    # -- out

    def sample(self, now: float, timeout_s: float = 0.0) -> int:
        """Poll the engine once, for about so long; the number of new tokens, or -1 when it said nothing."""
        try:
            deltas = self._engine.poll(timeout_s)
        except EngineLost as error:
            self.engine_lost(error)
            return -1
        n = 0
        mine = [(owned, one) for one in deltas if (owned := self.ledger.get(one.trajectory_id)) and owned.in_engine]
        for owned, delta in mine:
            n += delta.tokens.n_tokens
            self._receive(owned, delta, now)
        return n if deltas else -1

    def stage_deltas(self, now: float) -> None:
        """Put all fresh tokens into the outbox."""
        self.n_fresh = 0
        for owned in self.ledger:
            if not owned.n_fresh:
                continue
            try:
                record = outgoing(self._codec, event.tokens(owned, int(now * 1000)))
            except EncodeError as error:
                self._unsound(owned, error, now)
            else:
                self.outbox.put(owned, [record], now)
                owned.settle()

    def release(self, ids: Sequence[str], *, to_rollout: str, to_incarnation: int, now: float) -> None:
        """Give these to another rollout. Those not in hand any more are skipped."""
        for trajectory_id in ids:
            owned = self.ledger.get(trajectory_id)
            if owned is not None and self._withdraw(owned, now):
                self._leave(owned, "repack", to_rollout, to_incarnation, now)

    def hand_back_parked(self, version: int | None, now: float) -> None:
        """Their version is not to be had: somebody else may have it. None: all that wait."""
        for owned in self.ledger:
            if not owned.in_engine and version in (None, owned.version):
                self._leave(owned, "handback", self._rollout_id, event.POOL, now)

    def hand_over_all(self, now: float) -> None:
        """The process is asked to stop: what is finished is kept, everything else goes to the pool."""
        while len(self.ledger):  # one that fails on its way out begins again, a bounded number of times
            for owned in self.ledger:
                if self._withdraw(owned, now):
                    self._leave(owned, "drain", self._rollout_id, event.POOL, now)

    def bury_refused(self, now: float) -> None:
        """Records above their topic's limit: the trajectories end as dead letters."""
        for one in self.outbox.take_refused():
            self._bury(one.owned, type(one.error).__name__, str(one.error), now)

    def abandon(self) -> None:
        """Forget everything without a word: it belongs to others."""
        for owned in self.ledger:
            if owned.in_engine:
                self._abort(owned)
        self.ledger.clear()
        self.outbox.clear()
        self.n_fresh = 0

    # -- the engine

    def stats(self) -> EngineStats:
        """The engine's."""
        try:
            return self._engine.stats()
        except EngineLost as error:
            self.engine_lost(error)
            return self._engine.stats()

    def engine_lost(self, error: EngineLost, *, sampling: bool = True) -> None:
        """Nothing is in the engine any more; ``give_up`` comes next. ``sampling``: a trajectory may be the cause."""
        for owned in self.ledger:
            if owned.in_engine:
                owned.in_engine = False
                if sampling:
                    self._fallen.add(owned.trajectory_id)
        self.lost = error

    def give_up(self, now: float) -> tuple[int, int]:
        """Everything in hand goes to the pool, with every token that came out; how many trajectories and tokens."""
        n, n_tokens = len(self.ledger), sum(owned.n_response for owned in self.ledger)
        while len(self.ledger):  # one with unsound tokens is put back, a bounded number of times
            for owned in self.ledger:
                reason: r.MoveReason = "lost" if owned.trajectory_id in self._fallen else "drain"
                self._leave(owned, reason, self._rollout_id, event.POOL, now)
        self._fallen.clear()
        self.lost = None
        return n, n_tokens

    # -- one trajectory

    def _receive(self, owned: Owned, delta: Delta, now: float) -> None:
        n = delta.tokens.n_tokens
        if n:
            if not self.n_fresh:
                self.fresh_since = now
            self.n_fresh += n
            owned.add(delta.tokens)
            if not owned.first_token_ms:
                owned.first_token_ms = int(now * 1000)
        if delta.error is not None:
            owned.in_engine = False
            self._failed(owned, "EngineError", delta.error, now)
        elif delta.finish is not None:
            owned.in_engine = False
            self._finish(owned, delta.finish, now)

    def _finish(self, owned: Owned, finish: r.FinishReason, now: float) -> None:
        at_ms = int(now * 1000)
        version = self._engine.version
        try:
            owned.fresh().check(f"{owned.trajectory_id}: response")  # before anything is computed from it
            record = event.completed(
                owned,
                finish,
                text=self._text(owned),
                rollout_id=self._rollout_id,
                engine=self._engine.name,
                updates=self._updates,
                version=version,
                at_ms=at_ms,
            )
            records = [outgoing(self._codec, record), outgoing(self._codec, event.ended(owned, finish, at_ms))]
        except InvalidRecord as error:
            self._unsound(owned, error, now)
            return
        self.outbox.put(owned, records, now)
        self.ledger.remove(owned, owned.attempt)

    def _withdraw(self, owned: Owned, now: float) -> bool:
        """Take it out of the engine, with what was not polled yet. False: it ended or failed on the way."""
        if not owned.in_engine:
            return True
        rest = self._abort(owned)
        if rest is None:
            return True
        self._receive(owned, rest, now)
        return rest.finish is None and rest.error is None

    def _abort(self, owned: Owned) -> Delta | None:
        try:
            rest = self._engine.abort(owned.trajectory_id)
        except EngineLost as error:
            self.engine_lost(error)
            rest = None
        owned.in_engine = False
        return rest

    def _text(self, owned: Owned) -> str:
        ids = tuple(owned.response().ids_T.tolist())
        try:
            return self._engine.decode(ids)
        except EngineLost as error:
            self.engine_lost(error)
            return self._engine.decode(ids)  # it needs no weights; should it fail again, the process starts anew

    def _leave(self, owned: Owned, reason: r.MoveReason, to_rollout: str, to_incarnation: int, now: float) -> None:
        """{delta, Moved} and, to a live rollout, Adopt."""
        at_ms = int(now * 1000)
        try:
            records = [outgoing(self._codec, event.tokens(owned, at_ms))] if owned.n_fresh else []
        except EncodeError as error:
            self._unsound(owned, error, now)
            return
        move = event.moved(
            owned,
            reason=reason,
            from_rollout=self._rollout_id,
            to_rollout=to_rollout,
            to_incarnation=to_incarnation,
            at_ms=at_ms,
        )
        records.append(outgoing(self._codec, move))
        if to_incarnation != event.POOL:
            adopt = event.adopt(
                owned,
                from_rollout=self._rollout_id,
                to_rollout=to_rollout,
                to_incarnation=to_incarnation,
                version=max(0, self._engine.version),
                at_ms=at_ms,
            )
            records.append(outgoing(self._codec, adopt))
        owned.settle()
        self.outbox.put(owned, records, now)
        self.ledger.remove(owned, owned.attempt + 1)

    def _unsound(self, owned: Owned, error: InvalidRecord, now: float) -> None:
        """The engine gave tokens that the log must not see (case D1)."""
        if owned.in_engine:
            self._abort(owned)
        owned.drop_fresh()
        self._failed(owned, type(error).__name__, str(error), now)

    def _failed(self, owned: Owned, kind: str, error: str, now: float) -> None:
        owned.tries += 1
        try:
            owned.fresh().check(owned.trajectory_id)
        except InvalidRecord:
            owned.drop_fresh()
        logger.warning(
            "%s: attempt %d of %d failed: %s", owned.trajectory_id, owned.tries, self._member_attempts, error
        )
        if owned.tries >= self._member_attempts:
            self._bury(owned, kind, error, now)
        else:
            self.begin(owned, now)

    def _bury(self, owned: Owned, kind: str, error: str, now: float) -> None:
        """{Ended(finish=None), DeadLetter}."""
        at_ms = int(now * 1000)
        error = shortened(error)
        logger.error("%s: dead letter after %d attempts: %s", owned.trajectory_id, max(1, owned.tries), error)
        self._forget(owned, owned.attempt)
        letter = event.dead_letter(owned, operator=self._operator, kind=kind, error=error, at_ms=at_ms)
        end = event.ended(owned, None, at_ms, error)
        self.outbox.put(owned, [outgoing(self._codec, end), outgoing(self._codec, letter)], now)

    def _forget(self, owned: Owned, attempt: int) -> None:
        if owned.in_engine:
            self._abort(owned)
        self.ledger.remove(owned, attempt)

    def _fits(self, owned: Owned, reason: r.MoveReason) -> bool:
        """The check of a destination: what repack planned with may be a heartbeat old.

        One of a dead owner only has to be possible at all: it queues here rather than wander.
        """
        limits = self._engine.limits
        if owned.n_response and owned.n_tokens + 1 > min(limits.max_model_len, limits.kv_total):
            return False
        if reason != "repack":
            return True
        kv = self.ledger.n_tokens + owned.n_tokens + 1
        return len(self.ledger) < limits.max_running and kv <= limits.kv_total
