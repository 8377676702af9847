"""What a run looks like right now: one fold of the topics, which the terminal, the log line and the summary all show.

>>> fold = RunFold("first", steps=64)
>>> fold.apply(Evaluation(run_id="first", epoch=1, step=0, round=0, version=0, reward_mean=0.25, n=64,
...                       resolved=(), at_ms=0))
>>> fold.accuracy_before
0.25
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar.schemas import records as r

__all__ = ["Heartbeat", "InstanceView", "LagView", "RunFold", "Staleness", "View"]

REWARD_METRIC = "reward_mean"
"""Key of the mean reward of a step in TrainingStep.metrics."""

_RECENT = 16
"""Steps that the pace is measured over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One process."""

    instance: str
    state: str
    detail: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LagView:
    """How far a consumer group is behind on a topic."""

    topic: str
    group: str
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The newest sign of life of a rollout."""

    status: r.RolloutStatus

    def age_s(self, now: float) -> float:
        """Seconds since then; ``now`` in Unix epoch seconds."""
        return max(0.0, now - self.status.at_ms / 1000)

    @property
    def words(self) -> str:
        """What it says, in a few words; lost engines rather than how many are running."""
        status = self.status
        kv = f"KV {100 * status.kv_used // max(1, status.kv_total)} %"
        if status.engine_losses:
            return f"v{status.version}, {kv}, engine lost {status.engine_losses}x"
        return f"v{status.version}, {status.running} running, {kv}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """(version before the step - oldest version of a trained trajectory), over trained trajectories."""

    mean: float
    p99: int
    max: int

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> Staleness:
        """From staleness -> count."""
        total = sum(histogram.values())
        if not total:
            return cls(mean=0.0, p99=0, max=0)
        seen, p99 = 0, 0
        for value in sorted(histogram):
            seen += histogram[value]
            p99 = value
            if seen >= 0.99 * total:
                break
        mean = sum(value * count for value, count in histogram.items()) / total
        return cls(mean=mean, p99=p99, max=max(value for value, count in histogram.items() if count))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that is shown."""

    run_id: str
    step: int
    steps: int
    version: int
    """Newest version that a step made; -1 before the first trainer."""
    elapsed_s: float
    left_s: float | None
    """Estimate until the last step; None: unknown."""
    tokens_per_s: float
    """Sampled by all live rollouts together."""
    running: int
    """Trajectories being sampled."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    staleness: Staleness
    """Of the newest steps."""
    trained: int
    dropped: Mapping[str, int]
    accuracy_before: float | None
    accuracy_after: float | None
    instances: tuple[InstanceView, ...]
    lags: tuple[LagView, ...]
    ended: str | None
    """Why the run ended."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What is kept of a TrainingStep: no ids, so that a long run stays small."""

    trained: int
    dropped: Mapping[str, int]
    staleness: Mapping[int, int]
    reward: float | None

    @classmethod
    def of(cls, record: r.TrainingStep) -> _Step:
        return cls(
            trained=len(record.trained),
            dropped=Counter(item.reason for item in record.dropped),
            staleness={int(value): count for value, count in record.staleness.items()},
            reward=record.metrics.get(REWARD_METRIC),
        )


class RunFold:
    """Folds ``training.steps`` and ``rollouts.status``. Voided steps (see TrainerStarted) are taken back."""

    def __init__(self, run_id: str, steps: int) -> None:
        self._run_id = run_id
        self._steps = steps
        self._by_step: dict[int, _Step] = {}
        self._evaluations: dict[int, r.Evaluation] = {}
        self._epoch = -1
        self._version = -1
        self._paces: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._heartbeats: dict[str, Heartbeat] = {}
        self._ended: r.RunEnded | None = None
        self.exhausted: r.DataExhausted | None = None

    def apply(self, record: object) -> None:
        """Take the next record of either topic; others are ignored."""
        if isinstance(record, r.RolloutStatus):
            self._heartbeats[record.rollout_id] = Heartbeat(status=record)
        elif isinstance(record, r.TrainerStarted) and record.run_id == self._run_id and record.epoch >= self._epoch:
            self._epoch, self._version, self._ended = record.epoch, record.version, None
            for step in [step for step in self._by_step if step > record.step]:
                del self._by_step[step]
            self._paces.clear()
            self._paces.append((record.step, record.at_ms / 1000))
        elif isinstance(record, r.TrainingStep) and record.run_id == self._run_id and record.epoch >= self._epoch:
            self._by_step[record.step] = _Step.of(record)
            self._version = record.version
            self._paces.append((record.step, record.at_ms / 1000))
        elif isinstance(record, r.Evaluation) and record.run_id == self._run_id and record.epoch >= self._epoch:
            self._evaluations[record.round] = record
        elif isinstance(record, r.RunEnded) and record.run_id == self._run_id and record.epoch >= self._epoch:
            self._ended = record
        elif isinstance(record, r.DataExhausted) and record.run_id == self._run_id:
            self.exhausted = record

    @property
    def ended(self) -> r.RunEnded | None:
        """The end of the run, unless a trainer has started after it."""
        return self._ended

    @property
    def step(self) -> int:
        """Newest optimizer step."""
        return max(self._by_step, default=0)

    @property
    def accuracy_before(self) -> float | None:
        """Mean reward of evaluation round 0."""
        first = self._evaluations.get(0)
        return first.reward_mean if first is not None else None

    @property
    def accuracy_after(self) -> float | None:
        """Mean reward of the newest later evaluation round."""
        last = max(self._evaluations, default=0)
        return self._evaluations[last].reward_mean if last > 0 else None

    @property
    def last_heartbeat(self) -> Heartbeat | None:
        """The newest heartbeat of any rollout."""
        return max(self._heartbeats.values(), key=lambda beat: beat.status.at_ms, default=None)

    def heartbeat(self, rollout_id: str) -> Heartbeat | None:
        """The newest heartbeat of a rollout."""
        return self._heartbeats.get(rollout_id)

    def staleness(self, newest: int | None = None) -> Staleness:
        """Over all steps, or the newest ones."""
        histogram: Counter[int] = Counter()
        for step in sorted(self._by_step)[-newest if newest else 0 :]:
            histogram.update(self._by_step[step].staleness)
        return Staleness.of(histogram)

    def trained(self) -> int:
        """Trajectories that entered the loss."""
        return sum(step.trained for step in self._by_step.values())

    def dropped(self) -> dict[str, int]:
        """Finished trajectories that were not trained on, by reason."""
        counts: Counter[str] = Counter()
        for step in self._by_step.values():
            counts.update(step.dropped)
        for evaluation in self._evaluations.values():
            counts.update(item.reason for item in evaluation.resolved)
        return dict(sorted(counts.items()))

    def left_s(self, now: float) -> float | None:
        """Estimate of the seconds until the last step; None while there is none, or it has proved wrong."""
        if len(self._paces) < 2:
            return None
        (first, began), (last, at) = self._paces[0], self._paces[-1]
        if last <= first or at <= began:
            return None
        per_step_s = (at - began) / (last - first)
        left_s = (self._steps - last) * per_step_s - max(0.0, now - at)
        if left_s < 0 and last < self._steps:  # a step hangs, or the pace is that of a run which goes on only now
            return None
        return max(0.0, left_s)

    def view(
        self,
        now: float,
        *,
        started_at: float,
        instances: Sequence[InstanceView] = (),
        lags: Sequence[LagView] = (),
        dead_after_s: float = 10.0,
    ) -> View:
        """Everything that is shown; times in Unix epoch seconds."""
        beats = [b for b in self._heartbeats.values() if b.age_s(now) <= max(dead_after_s, b.status.lease_s)]
        live = [beat.status for beat in beats]
        rewards = [step.reward for _, step in sorted(self._by_step.items()) if step.reward is not None]
        return View(
            run_id=self._run_id,
            step=self.step,
            steps=self._steps,
            version=self._version,
            elapsed_s=max(0.0, now - started_at),
            left_s=self.left_s(now),
            tokens_per_s=sum(status.tokens_per_s for status in live),
            running=sum(status.running + status.waiting for status in live),
            rewards=tuple(rewards),
            staleness=self.staleness(_RECENT),
            trained=self.trained(),
            dropped=self.dropped(),
            accuracy_before=self.accuracy_before,
            accuracy_after=self.accuracy_after,
            instances=tuple(instances),
            lags=tuple(lags),
            ended=self._ended.reason if self._ended is not None else None,
        )
