"""Who is alive: rollouts by their newest heartbeat.

Liveness is judged by when the heartbeat was *received* on this process's clock, so clocks of other machines do not
matter, and a restarted repack gives everybody a full grace period. A rollout with slow polls announces a lease that is
longer than ``dead_after_s``, and gets that long.

The newest heartbeat on the log says which process a rollout is: a process that writes under its predecessor's
transactional id has fenced it, so nothing of the older one can follow. Incarnations are clock readings, and a clock may
have been set back between two processes: a larger one is a younger process only where the log does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.operators.repack.fold import POOL
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
        self._past: dict[str, set[int]] = {}
        self._unheard: dict[tuple[str, int], float] = {}
        """Owners without a heartbeat, and when they were first asked for."""

    def hear(self, status: RolloutStatus, now: float) -> None:
        """Take the next heartbeat of the log."""
        rollout, incarnation = status.rollout_id, status.incarnation
        known = self._entries.get(rollout)
        if known is not None and known.status.incarnation != incarnation:
            self._past.setdefault(rollout, set()).add(known.status.incarnation)
        self._past.get(rollout, set()).discard(incarnation)
        self._unheard.pop((rollout, incarnation), None)
        self._entries[rollout] = _Entry(status, now)

    def live(self, now: float) -> list[RolloutStatus]:
        """Heartbeats of all rollouts that are alive and take work. One without a batch has no room for any."""
        return [
            e.status
            for _, e in sorted(self._entries.items())
            if e.is_alive(now, self._dead_after_s)
            and e.status.state not in ("starting", "draining")
            and e.status.max_running > 0
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
                in_flight=s.updates == "in_flight",
            )
            for s in self.live(now)
        ]

    def owns(self, owner: tuple[str, int], now: float) -> bool:
        """Whether this (rollout, incarnation) may still be at work.

        One that was never heard of gets a grace period from the first time that it is asked for.
        """
        rollout, incarnation = owner
        entry = self._entries.get(rollout)
        if entry is not None and entry.status.incarnation == incarnation:
            return entry.is_alive(now, self._dead_after_s)
        if incarnation == POOL or incarnation in self._past.get(rollout, ()):
            return False
        if entry is not None and incarnation < entry.status.incarnation:
            return False  # this instance was not there when the process was replaced
        return now - self._unheard.setdefault(owner, now) < self._dead_after_s

    def newest(self, rollout: str) -> RolloutStatus | None:
        """The last heartbeat of a rollout."""
        entry = self._entries.get(rollout)
        return entry.status if entry else None
