"""The repack operator: consolidates the tail of unfinished trajectories, and adopts those of dead rollouts.

One instance is active: the owner of the single partition of ``rollouts.status`` in the operator's group. Every
transaction carries that membership, so an instance that lost it commits nothing (Evicted: it forgets its fold and
starts over).

Each step:
 1. heartbeats into the roster, lifecycle events into the partial pool (both come from the log alone);
 2. orphans, trajectories whose owner is dead, are placed: one transaction {Moved, Adopt} for each batch; one that
    owner after owner died with is a dead letter instead (see verdict);
 3. every ``period_s``, and right after a new policy version, the plan of Algorithm 1 becomes Release commands;
 4. the fold's restart offsets are committed to the group ``{group}.fold``: a restarted instance folds from there.

>>> op = Repack(RepackConfig(), context)                     # doctest: +SKIP
>>> op.step(time.time())
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from laminar.operators.operator import Context
from laminar.operators.repack.adoption import adopt
from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.decided import Decided
from laminar.operators.repack.fold import Alive, PartialPool
from laminar.operators.repack.policy import Orphan, place, plan
from laminar.operators.repack.roster import Roster
from laminar.operators.repack.verdict import condemn, deaths_by_now, is_suspect
from laminar.schemas import records as r
from laminar.schemas.errors import Evicted, Retryable
from laminar.streams.log import Membership, OutRecord, Reader, TopicPartition
from laminar.streams.reading import decoded
from laminar.streams.topics import outgoing

__all__ = ["Repack", "build"]

_STATUS = "rollouts.status"
_PARTIAL = "trajectories.partial"
_BATCH = 512
_BATCH_BYTES = 16 * 1024 * 1024
"""Of snapshots in one transaction; the rest follows in the next."""
_PLACE_PERIOD_S = 0.2
_COMMIT_PERIOD_S = 5.0

logger = logging.getLogger(__name__)


class Repack:
    """See the module's docstring."""

    def __init__(self, config: RepackConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._producer = context.log.producer(context.transactional_id)
        self._fold_group = Membership(f"{context.group}.fold")
        self._decided = Decided(context.group, _PARTIAL)
        self._consumer = context.log.consumer(
            context.group, [_STATUS], instance=context.instance, on_assign=self._skip_expired
        )
        self._reader: Reader | None = None
        self.moves = 0
        """Trajectories that live rollouts were asked to release."""
        self.adoptions = 0
        """Trajectories of dead rollouts given to others."""
        self.burials = 0
        """Trajectories that ended as dead letters because owner after owner died with them in hand."""
        self._forget()

    def _forget(self) -> None:
        self._pool = PartialPool()
        self._roster = Roster(self._config.dead_after_s, self._config.kv_fraction)
        self._caught_up = False
        self._busy: dict[str, tuple[float, int]] = {}
        self._orphaned: dict[str, float] = {}
        self._guarded: frozenset[str] = frozenset()
        self._newest_version = -1
        self._next_plan = self._next_place = self._next_commit = 0.0
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def step(self, now: float) -> bool:
        """See Operator.step."""
        worked = self._hear(now)
        if not self._consumer.assignment():
            if self._reader is not None:
                logger.info("another instance took over; going to standby")
                self._forget()
            return worked
        if self._reader is None:
            self._begin(now)
        worked = self._fold() or worked
        if not self._caught_up:
            return worked
        try:
            if now >= self._next_place:
                self._next_place = now + _PLACE_PERIOD_S
                worked = self._adopt(now) or worked
            if self._config.enabled and now >= self._next_plan:
                self._next_plan = now + self._config.period_s
                worked = self._release(now) or worked
            if now >= self._next_commit:
                self._next_commit = now + _COMMIT_PERIOD_S
                self._commit([])
        except Evicted as error:
            logger.info("lost the lead, nothing was committed: %s", error)
            self._forget()
        except Retryable as error:
            # It may have been committed all the same. A new producer of the id settles that; then decide again, after
            # reading up to the present end.
            logger.warning("not committed, will decide again: %s", error)
            self._producer.close()
            self._producer = self._context.log.producer(self._context.transactional_id)
            self._catch_up()
        return worked

    def drain(self, now: float) -> bool:
        """Nothing is in hand between steps."""
        del now
        return True

    def close(self) -> None:
        """See Operator.close."""
        if self._reader is not None:
            self._reader.close()
        self._consumer.close()
        self._producer.close()

    # -- what is known

    def _hear(self, now: float) -> bool:
        polled = self._consumer.poll(_BATCH, 0.0)
        for record, status in decoded(polled, self._context.codec):
            if not isinstance(status, r.RolloutStatus):
                continue
            # History read after a start must not pass for life: age it by its own timestamp.
            age = max(0.0, now - record.timestamp_ms / 1000) if not self._caught_up else 0.0
            self._roster.hear(status, now - age)
            if status.version > self._newest_version:
                self._newest_version = status.version
                self._next_plan = now
        return bool(polled)

    def _skip_expired(self, partitions: frozenset[TopicPartition]) -> None:
        """Heartbeats that retention has removed while the run stood still do not matter."""
        reader, position = self._context.log.reader(), self._consumer.position()
        for partition in partitions:
            start = reader.bounds(partition).start
            if position.get(partition, start) < start:
                self._consumer.seek(partition, start)
        reader.close()

    def _begin(self, now: float) -> None:
        self._reader = self._context.log.reader()
        self._decided.begin()
        count = self._context.log.topics()[_PARTIAL].partitions
        committed = self._context.log.committed(self._fold_group.group, _PARTIAL)
        partitions = [TopicPartition(_PARTIAL, index) for index in range(count)]
        starts = {p: self._reader.bounds(p).start for p in partitions}
        for partition, wanted in committed.items():
            if wanted < starts[partition]:
                logger.error(
                    "%s: offset %d is needed, but the log begins at %d: what had begun before is lost to its group"
                    " (retention is too short)",
                    partition,
                    wanted,
                    starts[partition],
                )
            starts[partition] = max(wanted, starts[partition])
        self._reader.assign(starts)
        self._catch_up()
        self._next_commit = now + _COMMIT_PERIOD_S
        logger.info("active: folding %s from %s", _PARTIAL, sum(starts.values()))

    def _catch_up(self) -> None:
        """Decide nothing before everything that is in the log as of now is folded, what was decided before with it."""
        assert self._reader is not None
        self._decided.load(self._context.log)
        self._caught_up = False
        self._targets = {p: self._reader.bounds(p).end for p in self._reader.position()}

    def _fold(self) -> bool:
        reader = self._reader
        if reader is None:
            return False
        polled = reader.poll(_BATCH, 0.0)
        for record, event in decoded(polled, self._context.codec):
            self._pool.apply(event, record.source, record.offset)
            self._decided.read(event, record.source)
        if not self._caught_up:
            position = reader.position()
            there = all(position[p] >= end for p, end in self._targets.items())
            self._caught_up = there and not self._decided.unread
            if self._caught_up:
                logger.info("folded: %d trajectories in flight", len(self._pool.alive))
        return bool(polled)

    # -- what is done

    def _adopt(self, now: float) -> bool:
        orphans: list[Orphan] = []
        condemned: list[Alive] = []
        guarded: set[str] = set()
        limit = self._config.max_owner_deaths
        for one in self._pool.alive.values():
            if self._roster.owns(one.owner, now):
                if is_suspect(one, limit):
                    guarded.add(one.owner[0])
                continue
            found = self._orphaned.setdefault(one.trajectory_id, now)
            if deaths_by_now(one) >= limit:
                condemned.append(one)
                continue
            suspect = is_suspect(one, limit, orphaned=True)
            orphans.append(Orphan(one.trajectory_id, one.version, one.n_tokens, now - found, one.refused, suspect))
        self._guarded = frozenset(guarded)
        if not orphans and not condemned:
            self._orphaned.clear()
            return False
        placements = place(
            orphans, self._roster.loads(now), version_wait_s=self._config.version_wait_s, guarded=guarded
        )
        at_ms = int(now * 1000)
        out: list[OutRecord] = []
        taken: list[tuple[Alive, r.TrajectoryMoved, r.TrajectoryEnded | None]] = []
        for one in condemned[:_BATCH]:
            verdict = condemn(one, operator=self._context.name, at_ms=at_ms)
            out += [outgoing(self._context.codec, record) for record in verdict]
            taken.append((one, verdict[0], verdict[1]))
        size = 0
        for placement in placements[:_BATCH]:
            if size > _BATCH_BYTES:
                break
            one = self._pool.alive[placement.trajectory_id]
            target = self._roster.newest(placement.rollout_id)
            if target is None:
                continue
            moved, command = adopt(one, target, keep_tokens=placement.keep_tokens, at_ms=at_ms)
            out += [outgoing(self._context.codec, moved), outgoing(self._context.codec, command)]
            size += len(out[-1].value or b"")
            taken.append((one, moved, None))
        if not out:
            return False
        self._commit(out, [one.source for one, _, _ in taken], at_ms)
        for one, moved, ended in taken:
            # The fold sees the records again and ignores them, since their attempt is no longer newer.
            self._orphaned.pop(one.trajectory_id, None)
            self._pool.apply(moved, one.source, one.first_offset)
            if ended is None:
                self.adoptions += 1
            else:
                self.burials += 1
                self._pool.apply(ended, one.source, one.first_offset)
                logger.error("%s: dead letter: %s", one.trajectory_id, ended.error)
        logger.info("placed %d trajectories of dead rollouts", len(taken))
        return True

    def _release(self, now: float) -> bool:
        busy = self._still_busy(now) | self._guarded
        moves = plan(self._roster.loads(now), busy)
        out: list[OutRecord] = []
        for move in moves:
            source, target = self._roster.newest(move.source), self._roster.newest(move.destination)
            if source is None or target is None:
                continue
            ids = tuple(
                one.trajectory_id
                for one in source.in_flight
                if (known := self._pool.alive.get(one.trajectory_id)) is not None
                and known.owner == (source.rollout_id, source.incarnation)
            )
            if not ids:
                continue
            release = r.ReleaseCommand(
                rollout_id=source.rollout_id,
                incarnation=source.incarnation,
                trajectory_ids=ids,
                to_rollout=target.rollout_id,
                to_incarnation=target.incarnation,
                at_ms=int(now * 1000),
            )
            out.append(outgoing(self._context.codec, release))
            self._busy[source.rollout_id] = (now, source.at_ms)
            self._busy[target.rollout_id] = (now, target.at_ms)
            self.moves += len(ids)
            logger.info("release: %d trajectories %s -> %s", len(ids), source.rollout_id, target.rollout_id)
        if out:
            self._commit(out)
        return bool(out)

    def _still_busy(self, now: float) -> frozenset[str]:
        """Rollouts whose last planned move may not show in their heartbeat yet."""
        settle_s = min(self._config.period_s, self._config.release_timeout_s)
        for rollout, (since, seen_at_ms) in list(self._busy.items()):
            status = self._roster.newest(rollout)
            settled = status is not None and status.at_ms > seen_at_ms and now - since > settle_s
            if settled or now - since > self._config.release_timeout_s:
                del self._busy[rollout]
        return frozenset(self._busy)

    def _commit(self, out: list[OutRecord], decided: Sequence[TopicPartition] = (), at_ms: int = 0) -> None:
        """``decided``: the partitions of the pool that get a decision of ``at_ms``."""
        assert self._reader is not None
        unread = self._decided.with_more(self._reader.position(), decided, at_ms)
        offsets = self._pool.resume_offsets(self._reader.position())
        with self._producer.transaction() as tx:
            for record in out:
                tx.send(record)
            tx.commit_offsets(self._consumer.membership(), self._consumer.position())
            tx.commit_offsets(self._fold_group, offsets)
            tx.commit_offsets(self._decided.membership, unread)
        self._decided.committed(unread)


def build(config: RepackConfig, context: Context) -> Repack:
    """The operator of a run file's ``kind: repack``."""
    return Repack(config, context)
