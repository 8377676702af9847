"""Whether the run is over, from ``training.steps``.

``RunEnded`` ends a run unless it is of an older epoch than the newest ``TrainerStarted``, or a ``TrainerStarted``
follows it: that is a resumed run. A resumed run's processes may start before its trainer has said so. Then:

* under ``laminar run`` they are told where the topic ended when the run began: an end before that is history;
* an operator that was started alone waits ``grace_s`` for a trainer, and only then believes the end that it found.

>>> life = RunLife("first")
>>> life.apply(0, TrainerStarted(run_id="first", epoch=1, step=0, version=0, at_ms=0))
>>> life.apply(1, RunEnded(run_id="first", epoch=1, step=64, reason="steps", at_ms=0))
>>> life.ended is not None
True
"""

from __future__ import annotations

import logging

from laminar.schemas.codec import Codec
from laminar.schemas.records import RunEnded, TrainerStarted
from laminar.streams.log import Log, TopicPartition
from laminar.streams.reading import decoded

__all__ = ["EndWatch", "RunLife"]

_STEPS = TopicPartition("training.steps", 0)
_TAIL = 512
"""An end is the last word of a run: more records before the end of the topic need not be read."""

logger = logging.getLogger(__name__)


class RunLife:
    """Folds ``training.steps`` into whether the run is over."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.epoch = -1
        """Of the newest trainer."""
        self.ended: RunEnded | None = None
        self.ended_at = -1
        """Offset of ``ended``."""

    def apply(self, offset: int, record: object) -> None:
        """Take the next record of the topic."""
        if isinstance(record, TrainerStarted) and record.run_id == self._run_id and record.epoch >= self.epoch:
            self.epoch, self.ended, self.ended_at = record.epoch, None, -1
        elif isinstance(record, RunEnded) and record.run_id == self._run_id and record.epoch >= self.epoch:
            self.ended, self.ended_at = record, offset


class EndWatch:
    """Follows the topic for one process."""

    def __init__(self, log: Log, codec: Codec, run_id: str, *, began_at: int | None, grace_s: float) -> None:
        """``began_at``: the topic's end when the run began; None: the operator was started alone."""
        self._codec = codec
        self._life = RunLife(run_id)
        self._reader = log.reader()
        bounds = self._reader.bounds(_STEPS)
        self._believed_from = bounds.end if began_at is None else began_at
        self._grace_s = grace_s if began_at is None else None
        self._first_seen: float | None = None
        start = max(bounds.start, bounds.end - _TAIL) if began_at is None else max(bounds.start, began_at)
        self._reader.assign({_STEPS: start})

    def poll(self, now: float) -> RunEnded | None:
        """The end of the run, once it is certain."""
        for record, event in decoded(self._reader.poll(256, 0.0), self._codec):
            self._life.apply(record.offset, event)
        ended = self._life.ended
        if ended is None or self._life.ended_at >= self._believed_from:
            self._first_seen = None
            return ended
        if self._grace_s is None:
            return None
        if self._first_seen is None:
            self._first_seen = now
            logger.info("the run has ended at step %d; waiting %g s for it to be resumed", ended.step, self._grace_s)
        return ended if now - self._first_seen >= self._grace_s else None

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
