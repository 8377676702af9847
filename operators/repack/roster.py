"""Who is alive: rollouts by their newest heartbeat.

Liveness is judged by when the heartbeat was *received* on this process's clock, so clocks of other machines do not
matter, and a restarted repack gives everybody a full grace period. A rollout with slow polls announces a lease that is
longer than ``dead_after_s``, and gets that long.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.operators.repack.policy import Load
from laminar.schemas.records import RolloutStatus

__all__ = ["Roster"]


@dataclass(slots=True)
class _Entry:
    status: RolloutStatus
    received: float

    def is_alive(self, now: float, dead_after_s: float) -> bool:
        return now - self.received < max(dead_after_s, self.status.lease_s)


class Roster:
    """Folds heartbeats."""

    def __init__(self, dead_after_s: float, kv_fraction: float) -> None:
        self._dead_after_s = dead_after_s
        self._kv_fraction = kv_fraction
        self._entries: dict[str, _Entry] = {}

    def hear(self, status: RolloutStatus, now: float) -> None:
        """Take a heartbeat; one of an older incarnation is ignored."""
        known = self._entries.get(status.rollout_id)
        if known is None or status.incarnation >= known.status.incarnation:
            self._entries[status.rollout_id] = _Entry(status, now)

    def live(self, now: float) -> list[RolloutStatus]:
        """Heartbeats of all rollouts that are alive and take work."""
        return [
            e.status
            for _, e in sorted(self._entries.items())
            if e.is_alive(now, self._dead_after_s) and e.status.state not in ("starting", "draining")
        ]

    def loads(self, now: float) -> list[Load]:
        """The same, as the policy sees them."""
        return [
            Load(
                rollout_id=s.rollout_id,
                incarnation=s.incarnation,
                version=s.version,
                kv_used=s.kv_used,
                kv_max=int(s.kv_total * self._kv_fraction),
                running=s.running,
                waiting=s.waiting,
                max_running=s.max_running,
            )
            for s in self.live(now)
        ]

    def owns(self, owner: tuple[str, int], now: float, *, known_since: float) -> bool:
        """Whether this (rollout, incarnation) may still be at work.

        One that was never heard of gets the grace period from ``known_since``.
        """
        rollout, incarnation = owner
        entry = self._entries.get(rollout)
        if entry is None or entry.status.incarnation < incarnation:
            return now - known_since < self._dead_after_s
        if entry.status.incarnation > incarnation:
            return False
        return entry.is_alive(now, self._dead_after_s)

    def newest(self, rollout: str) -> RolloutStatus | None:
        """The last heartbeat of a rollout."""
        entry = self._entries.get(rollout)
        return entry.status if entry else None
