"""When a rollout speaks, and what it says: a record on ``rollouts.status`` every period, and at once after a change.

A change is another state, another version, the last waiting request gone (ramp-down), or work that came or went by
command. Between two changes lies at least a short gap, so that a flood of them is a few records.
"""

from __future__ import annotations

from laminar.operators.rollout.engine import EngineLimits, EngineStats
from laminar.operators.rollout.ledger import Ledger
from laminar.schemas import records as r

__all__ = ["Heartbeat"]

_GAP_S = 0.05


class Heartbeat:
    """See the module's docstring. Times are Unix epoch seconds."""

    def __init__(self, rollout_id: str, limits: EngineLimits, *, period_s: float) -> None:
        self._rollout_id = rollout_id
        self._limits = limits
        self._period_s = period_s
        self._last: float | None = None
        self._seen: tuple[object, ...] = ()
        self._changed = True
        self._tokens = 0
        self._rate = 0.0

    @property
    def last(self) -> float | None:
        """When the last one was committed; None: never."""
        return self._last

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
    ) -> r.RolloutStatus:
        """The record."""
        if self._last is not None and now > self._last:
            self._rate = self._tokens / (now - self._last)
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
        )

    def renew(self) -> None:
        """Begin anew, as a process that has not spoken yet."""
        self._last = None
        self._changed = True

    def spoken(self, now: float) -> None:
        """It was committed."""
        self._last = now
        self._changed = False
        self._tokens = 0
