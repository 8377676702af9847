"""Reads a run's topics, once or again and again, and keeps the audit's state.

A look, in this order, so that it is sound beside a live system:

1. the ends of all partitions, then the committed offsets of rollouts, reward and trainer: whatever stands below them
   has its reasons and consequences on the log by now;
2. the ends once more, and everything up to them is read;
3. what is lacking for a record below the ends of 1 is a violation; for one between 1 and 2 it may still be on its way.
"""

from __future__ import annotations

from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError
from laminar.streams.audit.feed import Feed
from laminar.streams.audit.fold import Fold
from laminar.streams.audit.peek import Peek
from laminar.streams.audit.report import Reached, report
from laminar.streams.audit.steps import StepBook
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger, Place
from laminar.streams.log import Log, TopicPartition
from laminar.streams.reading import partitions_of, read_topic

__all__ = ["TOPICS", "Auditor"]

TOPICS = (
    "prompts",
    "trajectories.partial",
    "rollouts.commands",
    "trajectories.completed",
    "trajectories.scored",
    "dead.letters",
    "weights.versions",
    "training.steps",
)
"""What an audit reads."""
_MAY_BEGIN_LATE = frozenset({"weights.versions"})
"""Compacted."""


class Auditor:
    """See the module's docstring. Not thread-safe."""

    def __init__(
        self,
        log: Log,
        codec: Codec,
        run_id: str,
        *,
        rollout_group: str | None = None,
        reward_group: str | None = None,
        trainer_group: str | None = None,
        max_staleness: int | None = None,
        window: int = 16,
    ) -> None:
        """``window``: newest steps that are kept with all that they settled; a trainer that resumes from an older one
        costs a second reading. Raises UnknownTopic, Retryable."""
        self._log = log
        self._run_id = run_id
        self._rollout_group = rollout_group or f"{run_id}.rollout"
        self._reward_group = reward_group or f"{run_id}.reward"
        self._trainer_group = trainer_group or f"{run_id}.trainer"
        self._max_staleness, self._window = max_staleness, window
        self._peek = Peek(codec)
        self._bounds = log.reader()
        self._partitions = [p for topic in TOPICS for p in partitions_of(log, topic)]
        self._starts = {p: self._bounds.bounds(p).start for p in self._partitions}
        self._gone = frozenset(p.topic for p, start in self._starts.items() if start > 0) - _MAY_BEGIN_LATE
        self.fold = self._fold()
        self._feed = Feed(log, self._starts)
        self.records = 0
        """Read so far."""
        self.read_again = 0
        """How often the log was read again for members that were put away."""
        self._again_at = 0
        self.looks = 0
        """Begun so far."""

    def look(self, deadline: Deadline, *, thorough: bool = True) -> Ledger:
        """The ledger as of now, after which another look may follow.

        ``thorough``: members that were put away and named again are looked up, which costs a second reading; else only
        when one of them seems to have a second fate, or when the log has doubled since (until then such a member counts
        as what it was). Raises Retryable, DeadlineExceeded, OffsetOutOfRange (retention has passed what is to be read).
        """
        self.looks += 1
        before = self._ends()
        committed = {
            **self._log.committed(self._rollout_group, "prompts"),
            **self._log.committed(self._reward_group, "trajectories.completed"),
        }
        trainer = self._log.committed(self._trainer_group, "trajectories.scored")
        for record in self._feed.until(self._ends(), deadline):
            self.fold.apply(record)
            self.records += 1
        due = thorough or self.fold.urgent or self.records >= 2 * self._again_at
        if due and (self.fold.reopened or self.fold.steps.gap is not None):
            self._look_up(deadline)
        return report(self.fold, Reached(ends=before, committed=committed, trainer=trainer))

    @property
    def puzzled(self) -> int:
        """Members that were put away and named again, and are not looked up yet."""
        return len(self.fold.reopened)

    def close(self) -> None:
        """Release the readers."""
        self._feed.close()
        self._bounds.close()

    def _ends(self) -> dict[TopicPartition, int]:
        return {p: self._bounds.bounds(p).end for p in self._partitions}

    def _fold(self, only: set[str] | None = None, keep_above: int | None = None) -> Fold:
        return Fold(
            self._peek,
            self._run_id,
            max_staleness=self._max_staleness,
            gone=self._gone,
            window=self._window,
            only=only,
            keep_above=keep_above,
        )

    def _look_up(self, deadline: Deadline) -> None:
        """Read again, up to here, what the log says about the members that were put away too early."""
        self.read_again += 1
        self._again_at = self.records
        gap = self.fold.steps.gap
        if gap is not None:
            self._find_voided(gap, deadline)
        again = self._fold(set(self.fold.reopened), gap)
        ends = self._feed.positions()
        starts = {p: max(start, self._bounds.bounds(p).start) for p, start in self._starts.items()}
        feed = Feed(self._log, starts)
        try:
            for record in feed.until(ends, deadline):
                if record.offset < ends[record.source]:
                    again.apply(record)
        finally:
            feed.close()
        self.fold.restore(again, steps=gap is not None)

    def _find_voided(self, gap: int, deadline: Deadline) -> None:
        """Members whose fate was taken back after it had been put away."""
        book = StepBook(self._run_id, window=self._window, keep_above=gap)
        steps = TopicPartition("training.steps", 0)
        end = self._feed.positions()[steps]
        for record in read_topic(self._log, steps.topic, deadline):
            if record.offset >= end:
                break
            try:
                seen = self._peek.read(record.value or b"", record.topic)
            except DecodeError:
                continue
            for voided in book.apply(Place(record.topic, record.partition, record.offset), seen).voided:
                for trajectory_id, _ in voided.settled:
                    if self.fold.settled.get(trajectory_id) is not None:
                        self.fold.reopened.add(trajectory_id)
