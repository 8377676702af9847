"""The audit: what became of every admitted (prompt, member), from the topics alone.

One pass per topic, each record decoded once and forgotten; what is kept is one small entry per member. The order of the
passes lets it run beside a live system: what a later pass must find was written before an earlier one ended.

1. Committed offsets of rollouts and reward (before anything else: what they have passed is on the topics already).
2. ``training.steps``: a TrainerStarted voids the steps above it of older epochs; evaluations are never void.
3. ``trajectories.partial``: owners and ends. Token deltas are skipped by their fingerprint.
4. ``dead.letters``, ``trajectories.scored``, ``trajectories.completed``, ``prompts``.

>>> ledger = audit(log, codec, "run")                                                # doctest: +SKIP
>>> ledger.balanced, ledger.trained, ledger.dropped
(True, 1024, {'zero_advantage': 96, 'eval': 200})
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Evidence, Ledger, Place, Resolution, Result, Violation, settle
from laminar.streams.log import Log, LogRecord, TopicPartition
from laminar.streams.reading import partitions_of, read_topic

__all__ = ["audit"]

_TOPICS = (
    "training.steps",
    "trajectories.partial",
    "dead.letters",
    "trajectories.scored",
    "trajectories.completed",
    "prompts",
)
_DEAD_LETTERED = ("trajectories.scored", "trajectories.completed", "prompts")
"""Topics whose consumer writes a dead letter for what it cannot decode; all of them are read after dead.letters."""


def audit(
    log: Log,
    codec: Codec,
    run_id: str,
    *,
    rollout_group: str | None = None,
    reward_group: str | None = None,
    pinned: bool = True,
    deadline: Deadline | None = None,
) -> Ledger:
    """The ledger of a run, as of now.

    ``rollout_group``, ``reward_group``: the consumer groups (default ``{run_id}.rollout``, ``{run_id}.reward``);
    ``pinned``: two versions in one trajectory are a violation. Raises UnknownTopic, Retryable, DeadlineExceeded.
    """
    return _Audit(log, codec, run_id, pinned, deadline or Deadline.after(600.0, "audit")).run(
        rollout_group or f"{run_id}.rollout", reward_group or f"{run_id}.reward"
    )


class _Audit:
    def __init__(self, log: Log, codec: Codec, run_id: str, pinned: bool, deadline: Deadline) -> None:
        self._log = log
        self._codec = codec
        self._run_id = run_id
        self._pinned = pinned
        self._deadline = deadline
        self._seen = Evidence()
        self._letter_sources: set[Place] = set()
        """Records that a dead letter names."""

    def run(self, rollout_group: str, reward_group: str) -> Ledger:
        seen = self._seen
        seen.passed.update(self._log.committed(rollout_group, "prompts"))
        seen.passed.update(self._log.committed(reward_group, "trajectories.completed"))
        seen.incomplete = tuple(topic for topic in _TOPICS if self._begins_late(topic))
        self._read_steps()
        for place, record in self._records("trajectories.partial", skip=r.TrajectoryTokens.__name__):
            self._partial(place, record)
        for place, record in self._records("dead.letters"):
            self._dead_letter(place, record)
        for place, record in self._records("trajectories.scored"):
            if isinstance(record, r.ScoredTrajectory):
                made = record.trajectory
                seen.member(made.trajectory_id).scored.append(Result(made.attempt, place))
        for place, record in self._records("trajectories.completed"):
            self._completed(place, record)
        for place, record in self._records("prompts"):
            self._prompt(place, record)
        return settle(self._run_id, seen)

    def _begins_late(self, topic: str) -> bool:
        reader = self._log.reader()
        try:
            return any(reader.bounds(partition).start > 0 for partition in partitions_of(self._log, topic))
        finally:
            reader.close()

    def _records(self, topic: str, skip: str = "") -> Iterator[tuple[Place, object]]:
        """Every record of a topic that can be decoded, but those of the schema named ``skip``."""
        for record in read_topic(self._log, topic, self._deadline):
            value = record.value or b""
            if skip:
                schema = self._codec.schema_of(value)
                if schema is not None and schema.name == skip:
                    continue
            place = Place(record.topic, record.partition, record.offset)
            try:
                decoded = self._codec.decode(value)
            except DecodeError as error:
                self._undecodable(place, record, error)
            else:
                yield place, decoded

    def _undecodable(self, place: Place, record: LogRecord, error: DecodeError) -> None:
        """Allowed while its consumer has not reached it, and with a dead letter."""
        self._seen.undecodable += 1
        if place.topic in _DEAD_LETTERED and self._seen.has_passed(place) and place not in self._letter_sources:
            self._seen.violations.append(
                Violation(
                    kind="lost",
                    trajectory_id=(record.key or b"").decode("utf-8", "replace"),
                    place=str(place),
                    detail=f"passed without a dead letter: {error}",
                )
            )

    def _read_steps(self) -> None:
        """Which steps count, what they settled, and how far the trainer has got."""
        steps: list[tuple[Place, r.TrainingStep]] = []
        settled: list[tuple[Place, r.Evaluation]] = []
        epoch = -1
        for place, record in self._records("training.steps"):
            if getattr(record, "run_id", None) != self._run_id:
                continue
            if isinstance(record, r.TrainerStarted):
                kept = [s for s in steps if s[1].epoch >= record.epoch or s[1].step <= record.step]
                self._seen.void_steps += len(steps) - len(kept)
                steps, epoch = kept, max(epoch, record.epoch)
            elif isinstance(record, r.TrainingStep):
                if record.epoch < epoch:
                    self._seen.void_steps += 1
                else:
                    steps.append((place, record))
            elif isinstance(record, r.Evaluation):
                settled.append((place, record))
        for place, step in steps:
            for trajectory_id in step.trained:
                self._seen.member(trajectory_id).resolutions.append(Resolution(None, place))
            self._dropped(place, step.dropped)
            self._seen.staleness.update({int(lag): n for lag, n in step.staleness.items()})
        for place, evaluation in settled:
            self._dropped(place, evaluation.resolved)
        self._seen.steps = len(steps)
        if steps:
            for name, offset in steps[-1][1].offsets.items():
                topic, _, partition = name.removesuffix("]").rpartition("[")
                self._seen.passed[TopicPartition(topic, int(partition))] = offset

    def _dropped(self, place: Place, members: tuple[r.Dropped, ...]) -> None:
        for one in members:
            if one.reason != "duplicate":  # a second copy is not a fate
                self._seen.member(one.trajectory_id).resolutions.append(Resolution(one.reason, place))

    def _partial(self, place: Place, record: Any) -> None:
        if not isinstance(record, r.TrajectoryStarted | r.TrajectoryMoved | r.TrajectoryEnded):
            return
        member = self._seen.member(record.trajectory_id)
        if isinstance(record, r.TrajectoryEnded):
            if record.attempt < member.attempt or (member.ended is not None and record.attempt <= member.ended_attempt):
                member.late += 1
                return
            if member.ended is not None:
                member.late += 1  # the older end was valid when it was written; the newest owner's counts
            member.ended, member.ended_attempt, member.ended_dead = place, record.attempt, record.finish is None
        elif isinstance(record, r.TrajectoryStarted):
            member.started = member.started or place
        member.attempt = max(member.attempt, record.attempt)

    def _dead_letter(self, place: Place, record: object) -> None:
        if not isinstance(record, r.DeadLetter):
            return
        for trajectory_id in record.trajectory_ids:
            self._seen.member(trajectory_id).letters.append(place)
        source = Place(record.topic, record.partition, record.offset)
        if source in self._letter_sources:
            return
        self._letter_sources.add(source)
        if not record.trajectory_ids and record.topic in ("trajectories.completed", "trajectories.scored"):
            group = record.group_id or (record.key or b"").decode("utf-8", "replace")
            self._seen.unnamed_letters[group] += 1

    def _completed(self, place: Place, record: object) -> None:
        if not isinstance(record, r.CompletedTrajectory):
            return
        self._seen.member(record.trajectory_id).completed.append(Result(record.attempt, place))
        if record.version_min == record.version_max:
            self._seen.max_versions = max(self._seen.max_versions, min(1, record.response.n_tokens))
            return
        versions = sorted(set(record.response.versions_T[record.response.mask_T == 1].tolist()))
        self._seen.max_versions = max(self._seen.max_versions, len(versions))
        if self._pinned:
            self._seen.violations.append(
                Violation(
                    kind="two_versions",
                    trajectory_id=record.trajectory_id,
                    place=str(place),
                    detail=f"sampled by versions {', '.join(map(str, versions))} although versions are pinned",
                )
            )

    def _prompt(self, place: Place, record: object) -> None:
        if not isinstance(record, r.Prompt):
            return
        for number in range(record.group_size):
            trajectory_id = r.trajectory_id(record.prompt_id, number)
            member = self._seen.member(trajectory_id)
            if member.prompt is not None:
                detail = f"its prompt is also at {member.prompt}"
                self._seen.violations.append(
                    Violation(kind="admitted_twice", trajectory_id=trajectory_id, place=str(place), detail=detail)
                )
            member.prompt = member.prompt or place
            member.train = record.purpose == "train"
