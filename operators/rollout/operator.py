"""The rollout operator: takes groups, samples them under one policy version each, writes what it does.

One thread, small steps. Each step:

 1. every ``poll_s``: commands (Release, Adopt, Drain); new policy versions; the load of one when the round's rule says
    so; new groups, as many as fit at once (once it is worth it: ``round.fills_up``), in one transaction {Started of
    each member, offset of the prompts};
 2. one poll of the engine;
 3. when due, one transaction with everything that was decided since: deltas, {Completed, Ended}, {Moved, Adopt},
    {Ended, DeadLetter}, and the heartbeat.

A lost engine (EngineLost) ends nothing but what was in it: all that is in hand goes to the pool at once, with every
token that came out; the prompts are left to others; the state is ``starting``, for which repack has no work. Polls
bring the engine back, the newest version is loaded, and the rollout takes part again, as the same incarnation. One that
is lost ``engine.start_attempts`` times without a token in between takes the process along (Unavailable).

Guarantees beside those of ``work``, ``round`` and ``admission``: a trajectory is sampled only after its ``Started`` is
committed, and its group's offset with it, so a restarted rollout never takes a group again: repack gives the members
that did not end to somebody. What a crash loses is at most the tokens since the last delta.

Errors: Aborted and Evicted mean that nothing was written, and the step tries again. After any other Retryable the
outcome may be unknown: it flies, the process starts anew with a younger incarnation, and the log says what happened.
Fenced flies too: a successor is at work.

A process that could not speak for its lease (it was stopped, or the machine swapped) drops what it has in hand and
goes on as a younger incarnation: by then its trajectories belong to others, and commands that it has not read are void.
The lease is ``lease_s``, or three times the slowest poll of late if that is more; its heartbeats tell repack. A younger
incarnation takes nothing before it has spoken.

>>> operator = build(RolloutConfig(engine={"kind": "scripted"}), context)                      # doctest: +SKIP
>>> operator.step(time.time())                                                                 # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from laminar.operators.operator import Context
from laminar.operators.rollout.admission import Admission
from laminar.operators.rollout.checked_engine import CheckedEngine
from laminar.operators.rollout.command import Commands
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Engine
from laminar.operators.rollout.heartbeat import Heartbeat
from laminar.operators.rollout.ledger import Owned
from laminar.operators.rollout.losses import Losses
from laminar.operators.rollout.outlet import Outlet
from laminar.operators.rollout.round import fills_up
from laminar.operators.rollout.updates import Updates
from laminar.operators.rollout.work import Work
from laminar.operators.rollout.writer import Writer
from laminar.operators.weights import WeightSource
from laminar.schemas import records as r
from laminar.schemas.errors import EngineLost

__all__ = ["Rollout", "build"]

_MAX_OUTBOX_BYTES = 256 * 1024 * 1024
_SOON_S = 0.015
"""Between two looks at the prompts while responses end and leave the engine room; also how long the engine may decode
between two steps."""

logger = logging.getLogger(__name__)


class Rollout:
    """See the module's docstring."""

    def __init__(
        self,
        config: RolloutConfig,
        context: Context,
        *,
        engine: Engine,
        weights: WeightSource,
        close_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """``engine`` and ``weights`` are the rollout's own from here on; ``close`` calls ``close_weights``."""
        self._config = config
        self._context = context
        checked = CheckedEngine(engine, config.checks, clock=context.clock, measures=context.measures)
        self._engine = checked
        self._close_weights = close_weights
        self._max_in_flight = config.max_in_flight or engine.limits.max_running
        self.incarnation = int(context.clock() * 1000)
        """Of this process: larger = younger."""
        self._commands = Commands(context.log, context.codec, context.instance)
        self._writer = Writer(context.log.producer(context.transactional_id), context.background)
        self._admission = Admission(context, self._writer, max_in_flight=self._max_in_flight, updates=config.updates)
        self._work = Work(
            engine=checked,
            codec=context.codec,
            rollout_id=context.instance,
            operator=context.name,
            member_attempts=config.member_attempts,
            updates=config.updates,
        )
        self._updates = Updates(
            config,
            engine=checked,
            work=self._work,
            weights=weights,
            log=context.log,
            codec=context.codec,
            clock=context.clock,
        )
        self._heartbeat = Heartbeat(
            context.instance,
            engine.limits,
            period_s=config.heartbeat_s,
            lease_s=config.lease_s,
            updates=config.updates,
        )
        self._outlet = Outlet(
            config,
            context,
            work=self._work,
            writer=self._writer,
            heartbeat=self._heartbeat,
            status=self._status,
            renewed=self._lost_lease,
            incarnation=lambda: self.incarnation,
        )
        self._loading = False
        self._draining = False
        self._stopping = False
        self._losses = Losses(config.engine.start_attempts)
        self._polled = self._next_poll = 0.0
        logger.info(
            "%s: at most %d trajectories in flight (engine %s: %d in a batch, %d tokens of KV cache, %d a sequence)",
            context.instance,
            self._max_in_flight,
            engine.name,
            engine.limits.max_running,
            engine.limits.kv_total,
            engine.limits.max_model_len,
        )

    def step(self, now: float) -> bool:
        """See Operator.step."""
        self._lost_lease(now)
        worked = self._writer.land()
        if worked and self._has_room:
            self._next_poll = now  # groups first, then results: neither waits for two transactions of the other
        if now >= self._next_poll:
            self._polled, self._next_poll = now, now + self._config.poll_s
            worked = self._obey(now) or worked
            worked = self._updates.poll() or worked
            worked = self._load(now) or worked
            worked = self._take(now) or worked
            ledger = self._work.ledger
            waiting = self._work.stats().waiting + len(ledger) - ledger.sampling
            self._heartbeat.observe(self._state(), self._engine.version, waiting=waiting, in_hand=len(ledger))
        worked = self._sample(now) or worked
        worked = self._give_up(now) or worked
        return self._outlet.flush(now) or worked

    def drain(self, now: float) -> bool:
        """Take nothing new, give everything unfinished to the pool, and write all of it. See Operator.drain."""
        if not self._stopping:
            self._stopping = self._draining = True
            self._writer.land(wait=True)
            self._admission.close()
            self._work.hand_over_all(now)
            self._give_up(now)
            self._heartbeat.hurry()
        self._outlet.flush(now, force=True)
        return len(self._work.outbox) == 0

    def close(self) -> None:
        """See Operator.close."""
        self._writer.close()
        self._admission.close()
        self._commands.close()
        self._updates.close()
        self._engine.close()
        self._close_weights()

    # -- 1. commands, versions, groups

    def _obey(self, now: float) -> bool:
        commands = self._commands.poll(self.incarnation)
        for command in commands:
            match command:
                case r.ReleaseCommand():
                    if (command.to_rollout, command.to_incarnation) != (self._context.instance, self.incarnation):
                        self._work.release(
                            command.trajectory_ids,
                            to_rollout=command.to_rollout,
                            to_incarnation=command.to_incarnation,
                            now=now,
                        )
                case r.AdoptCommand():
                    self._work.adopt(command, now, accept=not self._draining and self._engine.version >= 0)
                case r.DrainCommand():
                    logger.info("asked to drain: finishing %d trajectories", len(self._work.ledger))
                    self._draining = True
            self._outlet.hurry()
            self._heartbeat.hurry()
        return bool(commands)

    def _load(self, now: float) -> bool:
        if not self._has_engine or self._admission.pending:
            return False
        plan = self._updates.plan(now)
        if plan is None:
            self._leave_prompts(now)
            return False
        self._loading = True
        self._heartbeat.hurry()
        self._outlet.flush(now, force=True)
        self._loading = False
        if not self._has_engine:
            return True
        began = self._context.clock()
        try:
            self._updates.load(plan, now)
        except EngineLost as error:
            self._work.engine_lost(error, sampling=False)
        ended = self._context.clock()
        self._heartbeat.took(ended - began, ended)
        self._leave_prompts(now)
        self._heartbeat.hurry()
        return True

    def _leave_prompts(self, now: float) -> None:
        """No weights, so no groups: others shall have its prompts."""
        if self._updates.leaves_prompts(now):
            self._admission.close()

    def _take(self, now: float) -> bool:
        if self._writer.busy:
            return False
        known = self._heartbeat.last is not None
        may_take = known and not self._draining and self._work.outbox.n_bytes < _MAX_OUTBOX_BYTES
        in_hand, max_running = len(self._work.ledger), self._engine.limits.max_running
        wants = fills_up(in_hand, max_in_flight=self._max_in_flight, max_running=max_running)
        taken: list[Owned] = []
        incarnation = self.incarnation

        def begin(members: list[Owned]) -> None:
            if incarnation != self.incarnation:
                return  # it lost its lease meanwhile, and they belong to others
            taken.extend(members)
            for member in members:
                self._work.begin(member, now)

        if may_take and wants and self._updates.takes_groups():
            self._admission.take(
                now,
                in_flight=in_hand,
                incarnation=incarnation,
                version=self._engine.version,
                engine=self._engine.name,
                then=begin,
            )
        self._admission.keep_alive(now)
        return bool(taken)

    @property
    def _has_room(self) -> bool:
        """Whether the engine could decode more than is in hand."""
        return len(self._work.ledger) < self._engine.limits.max_running

    # -- 2. the engine

    def _sample(self, now: float) -> bool:
        if not len(self._work.ledger) and self._engine.ready:
            return False
        began = self._context.clock()
        in_hand = len(self._work.ledger)
        n = self._work.sample(now, max(0.0, min(_SOON_S, self._next_poll - now)))
        if len(self._work.ledger) < min(in_hand, self._engine.limits.max_running):
            self._next_poll = min(self._next_poll, self._polled + _SOON_S)
        ended = self._context.clock()
        took = ended - began
        self._heartbeat.took(took, ended)
        if took > self._config.lease_s / 2:
            logger.warning(
                "one poll of the engine took %.1f s (lease_s = %g s): if this process dies, its trajectories wait that"
                " much longer for others; make polls shorter (engine.max_running, steps_per_poll)",
                took,
                self._config.lease_s,
            )
        self._heartbeat.count(max(0, n))
        if n > 0:
            self._losses.sampled()
        if n >= 0 and not len(self._work.ledger):
            self._outlet.hurry()
            self._next_poll = now
        return n >= 0

    @property
    def _has_engine(self) -> bool:
        return self._engine.ready and self._work.lost is None

    def _give_up(self, now: float) -> bool:
        """Whether the engine was lost: nothing stays in hand, and prompts are for others."""
        error = self._work.lost
        if error is None:
            return False
        self._writer.land(wait=True)
        self._admission.close()
        n, n_tokens = self._work.give_up(now)
        self._losses.count(error, n=n, n_tokens=n_tokens)
        self._outlet.hurry()
        self._heartbeat.hurry()
        if not self._stopping:
            self._losses.check(error)
        return True

    # -- 3. what it says of itself

    def _status(self, now: float) -> r.RolloutStatus:
        status = self._heartbeat.status(
            now=now,
            incarnation=self.incarnation,
            state=self._state(),
            version=self._engine.version,
            stats=self._work.stats(),
            ledger=self._work.ledger,
            engine_losses=self._losses.n,
        )
        self._heartbeat.show(status, self._context.measures)
        return status

    def _state(self) -> r.RolloutState:
        if self._draining:
            return "draining"
        if self._engine.version < 0:
            return "starting"  # also while it loads: repack gives nothing to a rollout that never held a version
        if self._loading:
            return "loading"
        return "sampling" if len(self._work.ledger) else "idle"

    def _lost_lease(self, now: float) -> bool:
        """Asked before work is taken or written: whether it was silent for too long, and so has nothing any more."""
        last = self._heartbeat.last
        if last is None or now - last <= self._heartbeat.lease_s:
            return False
        logger.warning("silent for %.1f s: %d trajectories belong to others by now", now - last, len(self._work.ledger))
        self._work.abandon()
        self.incarnation = max(self.incarnation + 1, int(now * 1000))
        self._heartbeat.renew()
        return True


def build(config: RolloutConfig, context: Context) -> Rollout:
    """The operator of a run file's ``kind: rollout``, with the engine that its config names and the run's relays."""
    from laminar.operators.relay.source import RelaySource
    from laminar.operators.rollout.engines.choice import build_engine

    source = RelaySource.from_context(context)
    engine = build_engine(config.engine, context)
    return Rollout(config, context, engine=engine, weights=source, close_weights=source.close)
