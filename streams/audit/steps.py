"""``training.steps``, folded: which steps count, what the newest ones settled, and whether the run is over.

A TrainerStarted voids the steps above its own. How far back is not bounded by anything on the log (a person may restore
any checkpoint), so the newest ``window`` steps are kept with all that they settled; when a trainer resumes from below
them, ``gap`` says so, and the topic has to be read again with ``keep_above``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from laminar.schemas import records as r
from laminar.streams.audit.member import Resolution
from laminar.streams.audit.versions import Numbers
from laminar.streams.ledger import Place, Violation, ViolationKind

__all__ = ["Change", "Round", "Settling", "Step", "StepBook"]

Settling = tuple[str, Resolution]


@dataclass(slots=True, eq=False)
class Step:
    """A TrainingStep that counts."""

    place: Place
    epoch: int
    step: int
    settled: tuple[Settling, ...]
    staleness: Mapping[str, int]
    offsets: Mapping[str, int]


@dataclass(slots=True, eq=False)
class Round:
    """A written Evaluation."""

    place: Place
    followed: Place | None = None
    """A later step: the round was not the run's last, so it was complete when it was written."""


@dataclass(slots=True)
class Change:
    """What a record changed for members."""

    settled: tuple[Settling, ...] = ()
    for_good: bool = False
    """No trainer takes it back."""
    voided: list[Step] = field(default_factory=list)
    firm: list[Step] = field(default_factory=list)
    """Steps that have left the window."""


class StepBook:
    """See the module's docstring."""

    def __init__(self, run_id: str, *, window: int, keep_above: int | None = None, lenient: bool = False) -> None:
        self._run_id = run_id
        self._window = window
        self._keep_above = keep_above
        self._lenient = lenient
        self.window: deque[Step] = deque()
        self.evicted: Step | None = None
        """The newest that left the window, without what it settled."""
        self.gap: int | None = None
        """A trainer resumed at this step, below the window."""
        self.steps = self.void_steps = self.highest = 0
        self.staleness: Counter[int] = Counter()
        self.made = Numbers()
        """Policy versions that trainers gave away."""
        self.rounds: dict[int, Round] = {}
        self.ended: r.RunEnded | None = None
        self._epoch = -1
        self._last = 0
        self._version: int | None = None
        self._ended_epochs: set[int] = set()
        self._open_rounds: list[Round] = []
        """Not followed by anything yet."""
        self._faults: list[Violation] = []

    def apply(self, place: Place, record: object) -> Change:
        """The next record; the topic has one partition."""
        change = Change()
        if getattr(record, "run_id", None) != self._run_id:
            return change
        if isinstance(record, r.TrainerStarted):
            self._started(place, record, change)
        elif isinstance(record, r.TrainingStep):
            self._step(place, record, change)
        elif isinstance(record, r.Evaluation):
            self._evaluation(place, record, change)
        elif isinstance(record, r.RunEnded):
            self._end(place, record)
        return change

    def violations(self) -> Iterator[Violation]:
        """What the topic contradicts by itself."""
        yield from self._faults

    def _fault(self, kind: ViolationKind, what: str, place: Place, detail: str, *others: Place) -> None:
        places = (str(place), *map(str, others))
        self._faults.append(Violation(kind=kind, trajectory_id=what, place=places[0], detail=detail, places=places))

    def _started(self, place: Place, record: r.TrainerStarted, change: Change) -> None:
        if record.epoch <= self._epoch:
            self._fault("trainer_twice", f"epoch {record.epoch}", place, f"epoch {self._epoch} has begun before")
            return
        if record.step > self._last and not (self._lenient and not self.steps):
            self._missing(place, self._last + 1, record.step, "a trainer resumed from it")
        if self.made and record.version <= self.made.last:
            self._fault(
                "wrong_version", f"epoch {record.epoch}", place, f"version {record.version} was given away before"
            )
        elif self.made and record.version > self.made.last + 1:
            detail = f"a trainer took version {record.version}; the newest one that anything made is {self.made.last}"
            self._fault("step_missing", f"version {record.version - 1}", place, detail)
        while self.window and self.window[-1].step > record.step:
            voided = self.window.pop()
            change.voided.append(voided)
            self.void_steps += 1
            self.steps -= 1
            self.staleness -= _lags(voided)
        if self.evicted is not None and self.evicted.step > record.step:
            self.gap = record.step if self.gap is None else min(self.gap, record.step)
        self._epoch, self._last, self._version = record.epoch, record.step, record.version
        self.made.add(record.version)
        self.ended = None

    def _step(self, place: Place, record: r.TrainingStep, change: Change) -> None:
        what = f"step {record.step}"
        if record.epoch < self._epoch:
            self.void_steps += 1
            self._fault("fenced_step", what, place, f"of epoch {record.epoch}, after a trainer of {self._epoch} began")
            return
        before = self.window[-1] if self.window else self.evicted
        if record.epoch > self._epoch:
            if not (self._lenient and self._epoch < 0):
                self._fault("trainer_missing", what, place, f"of epoch {record.epoch}, in which no trainer has started")
            self._epoch, self._version = record.epoch, None
        if record.step <= self._last:
            others = [one.place for one in self.window if one.step == record.step]
            self._fault("step_twice", what, place, f"the newest step is {self._last}", *others)
            return
        if record.step > self._last + 1 and not (self._lenient and not self.steps):
            self._missing(place, self._last + 1, record.step - 1, f"the next one is {record.step}")
        if self._version is not None and record.version != self._version + 1:
            self._fault("wrong_version", what, place, f"made version {record.version} from {self._version}")
        if before is not None and before.step <= self._last:
            for name, offset in record.offsets.items():  # a letter that is retried may lie before those of dead.letters
                if name.startswith("trajectories.scored[") and offset < before.offsets.get(name, 0):
                    detail = f"{name} goes back from {before.offsets[name]} to {offset}"
                    self._fault("offsets_back", what, place, detail, before.place)
        self._version, self._last = record.version, record.step
        self.made.add(record.version)
        self.highest = max(self.highest, record.step)
        self.steps += 1
        settled = [(one, Resolution(None, place, record.version - 1)) for one in record.trained]
        settled += [
            (one.trajectory_id, Resolution(one.reason, place, record.version - 1))
            for one in record.dropped
            if one.reason != "duplicate"  # a second copy is not a fate
        ]
        made = Step(place, record.epoch, record.step, tuple(settled), record.staleness, record.offsets)
        self.staleness += _lags(made)
        self.window.append(made)
        change.settled = made.settled
        for one in self._open_rounds:
            one.followed = place
        self._open_rounds = []
        while len(self.window) > self._window and self._may_leave(self.window[0]):
            gone = self.window.popleft()
            change.firm.append(gone)
            self.evicted = Step(gone.place, gone.epoch, gone.step, (), {}, gone.offsets)

    def _may_leave(self, step: Step) -> bool:
        return self._keep_above is None or step.step <= self._keep_above

    def _evaluation(self, place: Place, record: r.Evaluation, change: Change) -> None:
        what = f"round {record.round}"
        known = self.rounds.get(record.round)
        if known is not None:
            self._fault("evaluated_twice", what, place, f"it is also at {known.place}", known.place)
            return
        n = sum(one.reason == "eval" for one in record.resolved)
        if n != record.n:
            self._fault("altered", what, place, f"has {record.n} scored answers and settles {n}")
        self.rounds[record.round] = made = Round(place)
        self._open_rounds.append(made)
        change.settled = tuple((one.trajectory_id, Resolution(one.reason, place, -1)) for one in record.resolved)
        change.for_good = True

    def _end(self, place: Place, record: r.RunEnded) -> None:
        if record.epoch in self._ended_epochs:
            self._fault("run_ended_twice", f"epoch {record.epoch}", place, "it has ended before")
            return
        self._ended_epochs.add(record.epoch)
        if record.step > self._last and not (self._lenient and not self.steps):
            self._missing(place, self._last + 1, record.step, "the run ended with it")
        if record.epoch >= self._epoch:
            self.ended = record
        self._open_rounds = []

    def _missing(self, place: Place, first: int, last: int, why: str) -> None:
        what = f"step {first}" if first == last else f"steps {first} to {last}"
        self._fault("step_missing", what, place, f"not recorded, but {why}")


def _lags(step: Step) -> Counter[int]:
    return Counter({int(lag): n for lag, n in step.staleness.items()})
