"""Follows a run from outside: its steps, heartbeats and lags, and whether it still gets anywhere.

Progress is a new record on a topic of the data's way; heartbeats are not progress. When nothing moves for
``no_progress_timeout_s`` the diagnosis names the topic with the largest lag and the last heartbeat. That time is
monotonic: a wall clock that is set does not end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.lag import lag_views
from laminar.pipeline.view import InstanceView, LagView, RunFold, View
from laminar.schemas.records import RunEnded
from laminar.streams.log import Log, TopicPartition
from laminar.streams.open import open_codec
from laminar.streams.reading import Tail, decoded, partitions_of

__all__ = ["RunWatch"]

_STEPS = TopicPartition("training.steps", 0)
_STATUS = TopicPartition("rollouts.status", 0)
_DATA = (
    "prompts",
    "trajectories.partial",
    "trajectories.completed",
    "trajectories.scored",
    "weights.versions",
    "training.steps",
    "dead.letters",
)
_LAG_PERIOD_S = 1.0
_MAX_POLLS = 50
_DEAD_AFTER_S = 10.0


class RunWatch:
    """See the module's docstring. ``now`` is in Unix epoch seconds."""

    def __init__(self, config: RunConfig, log: Log, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._config = config
        self._log = log
        self._codec = open_codec(config.log)
        self._codec.prepare()
        self.fold = RunFold(config.name, config.steps)
        self.trouble: str | None = None
        """Why the log cannot be read at the moment."""
        repack = next((o for o in config.operators.values() if getattr(o, "kind", "") == "repack"), None)
        self.dead_after_s = float(getattr(repack, "dead_after_s", _DEAD_AFTER_S))
        self._reader = log.reader()
        self.began_at = self._reader.bounds(_STEPS).end
        """The end of ``training.steps`` when the run began: a RunEnded before it is history."""
        self._tail = Tail(log, [_STEPS.topic, _STATUS.topic], start={_STATUS: self._reader.bounds(_STATUS).end})
        self._data = [partition for topic in _DATA for partition in partitions_of(log, topic)]
        self._ends: dict[TopicPartition, int] = {}
        self._moved_at: float | None = None
        self._lags: list[LagView] = []
        self._next_lag = 0.0

    def poll(self) -> None:
        """Take what is new. Raises Retryable while the log does not answer."""
        for _ in range(_MAX_POLLS):
            records = self._tail.poll()
            for record, event in decoded(records, self._codec):
                if isinstance(event, RunEnded) and record.offset < self.began_at:
                    continue
                self.fold.apply(event)
            if not records:
                break
        at = self._clock()
        if at >= self._next_lag:
            self._next_lag = at + _LAG_PERIOD_S
            self._lags = lag_views(self._log, self._config)
            ends = {partition: self._reader.bounds(partition).end for partition in self._data}
            if ends != self._ends:
                self._ends, self._moved_at = ends, at

    def view(self, now: float, started_at: float, instances: Sequence[InstanceView]) -> View:
        """What is shown."""
        return self.fold.view(
            now, started_at=started_at, instances=instances, lags=self._lags, dead_after_s=self.dead_after_s
        )

    def stalled(self, now: float) -> str | None:
        """The reason to give up, once nothing has moved for too long."""
        at = self._clock()
        if self._moved_at is None:
            self._moved_at = at
        limit_s = self._config.supervisor.no_progress_timeout_s
        if at - self._moved_at < limit_s:
            return None
        return f"no progress for {limit_s:g} s: {self.diagnosis(now)}"

    def diagnosis(self, now: float) -> str:
        """Where the run stands, for the reason of its end."""
        if self.trouble is not None:
            return f"the log does not answer: {self.trouble}"
        worst = max(self._lags, key=lambda lag: lag.records, default=None)
        where = (
            f"topic {worst.topic} has a lag of {worst.records} (group {worst.group})" if worst else "no topic is read"
        )
        beat = self.fold.last_heartbeat
        if beat is None:
            return f"{where}; no rollout has sent a heartbeat since the run began"
        return f"{where}; last heartbeat of a rollout: {beat.status.rollout_id}, {beat.age_s(now):.0f} s ago"

    def close(self) -> None:
        """Release the readers."""
        self._tail.close()
        self._reader.close()
