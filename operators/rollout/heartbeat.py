"""When a rollout speaks, and what it says: a record on ``rollouts.status`` every period, and at once after a change.

A change is another state, another version, the last waiting request gone (ramp-down), or work that came or went by
command. Between two changes lies at least a short gap, so that a flood of them is a few records.

The lease, how long the rollout may be silent and keep what it has in hand, is part of what it says. It grows with the
slowest thing that it did lately, since it cannot speak meanwhile; what counts is what was committed, not what it
would say next.
"""

from __future__ import annotations

from laminar.operators.measure import Measures
from laminar.operators.rollout.engine import EngineLimits, EngineStats
from laminar.operators.rollout.ledger import Ledger
from laminar.schemas import records as r

__all__ = ["Heartbeat"]

_GAP_S = 0.05
_LEASE_POLLS = 3.0
"""The lease is at least so many times the slowest recent poll: one between two heartbeats, one in each of them."""
_LONGEST_LEASE_S = 600.0
"""However long a poll took (the process may have been stopped), unless more is configured."""
_SLOWEST_HALF_LIFE_S = 30.0
"""How fast a slow poll is forgotten."""


class Heartbeat:
    """See the module's docstring. Times are Unix epoch seconds."""

    def __init__(
        self,
        rollout_id: str,
        limits: EngineLimits,
        *,
        period_s: float,
        lease_s: float,
        updates: r.UpdateMode = "pinned",
    ) -> None:
        self._rollout_id = rollout_id
        self._updates = updates
        self._limits = limits
        self._period_s = period_s
        self._configured_lease_s = self._lease_s = self._next_lease_s = lease_s
        self._slowest_s = self._slowest_at = 0.0
        self._last: float | None = None
        self._seen: tuple[object, ...] = ()
        self._changed = True
        self._tokens = self._said_tokens = 0
        self._rate = 0.0

    @property
    def last(self) -> float | None:
        """When the last one was committed; None: never."""
        return self._last

    @property
    def lease_s(self) -> float:
        """The lease that the others know: of the last heartbeat that was committed."""
        return self._lease_s

    def took(self, seconds: float, now: float) -> None:
        """Something during which it could not speak took so long."""
        self._slowest_s, self._slowest_at = max(seconds, self._slowest(now)), now

    def count(self, n_tokens: int) -> None:
        """So many tokens were sampled."""
        self._tokens += n_tokens

    def observe(self, state: r.RolloutState, version: int, *, waiting: int, in_hand: int) -> None:
        """Notice a change."""
        seen = (state, version, waiting == 0, in_hand == 0)
        if seen != self._seen:
            self._seen = seen
            self._changed = True

    def hurry(self) -> None:
        """Speak soon."""
        self._changed = True

    def is_due(self, now: float) -> bool:
        """Whether to speak now."""
        if self._last is None:
            return True
        return now - self._last >= (min(_GAP_S, self._period_s) if self._changed else self._period_s)

    def status(
        self,
        *,
        now: float,
        incarnation: int,
        state: r.RolloutState,
        version: int,
        stats: EngineStats,
        ledger: Ledger,
        engine_losses: int = 0,
    ) -> r.RolloutStatus:
        """The record."""
        self._next_lease_s = max(self._configured_lease_s, min(_LEASE_POLLS * self._slowest(now), _LONGEST_LEASE_S))
        if self._last is not None and now > self._last:
            self._rate = self._tokens / (now - self._last)
        self._changed, self._said_tokens = False, self._tokens
        in_flight = tuple(
            r.InFlight(trajectory_id=one.trajectory_id, attempt=one.attempt, n_tokens=one.n_tokens) for one in ledger
        )
        return r.RolloutStatus(
            rollout_id=self._rollout_id,
            incarnation=incarnation,
            state=state,
            version=version,
            kv_used=stats.kv_used,
            kv_total=stats.kv_total,
            running=stats.running,
            waiting=stats.waiting + len(ledger) - ledger.sampling,
            preempted=stats.preempted,
            max_running=self._limits.max_running,
            tokens_per_s=self._rate,
            in_flight=in_flight,
            at_ms=int(now * 1000),
            lease_s=self._next_lease_s,
            updates=self._updates,
            engine_losses=engine_losses,
        )

    @staticmethod
    def show(status: r.RolloutStatus, measures: Measures) -> None:
        """For ``/metrics``."""
        measures.gauges.update(
            rollout_running=status.running,
            rollout_waiting=status.waiting,
            rollout_version=status.version,
            rollout_kv_used_tokens=status.kv_used,
            rollout_kv_total_tokens=status.kv_total,
            rollout_tokens_per_second=status.tokens_per_s,
            rollout_preempted=status.preempted,
            rollout_engine_losses=status.engine_losses,
        )

    def renew(self) -> None:
        """Begin anew, as a process that has not spoken yet."""
        self._last = None
        self._changed = True

    def spoken(self, now: float) -> None:
        """The newest ``status`` was committed; ``now`` is when it was made. If it was not: ``hurry``."""
        self._last = now
        self._lease_s = self._next_lease_s
        self._tokens -= self._said_tokens
        self._said_tokens = 0

    def _slowest(self, now: float) -> float:
        return float(self._slowest_s * 0.5 ** (max(0.0, now - self._slowest_at) / _SLOWEST_HALF_LIFE_S))
