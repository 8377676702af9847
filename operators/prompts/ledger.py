"""What became of every admitted group, folded from the log.

Folds ``weights.versions``, ``prompts`` (its own output), ``training.steps`` and ``dead.letters``; at a start in this
order, so that no group is resolved before it is known. Memory follows what is outstanding and what died, plus the last
steps, which a trainer that resumes from a checkpoint below them takes back.

A step resolves each group that it names: what it does not name of a group is dead, by a letter that may not even say
which member it was. A group whose members all died is outstanding again once one of their letters is retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.operators.prompts.pacing import Load
from laminar.schemas import records as r

__all__ = ["GroupLedger"]

_UNDO_STEPS = 512


@dataclass(slots=True)
class _Group:
    step: int
    """Optimizer steps behind the version that was the newest at admission."""
    members: set[str]
    """Not resolved yet."""


@dataclass(slots=True)
class _StepEntry:
    epoch: int
    step: int
    resolved: list[str]
    closed: dict[str, _Group] = field(default_factory=dict)
    """Groups that this step closed."""


class GroupLedger:
    """See the module's docstring. Each record is applied once."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.train_fingerprints: set[str] = set()
        self.admitted = 0
        """Training groups."""
        self.rows: dict[int, list[int]] = {}
        """The newest epoch -> row numbers admitted of it."""
        self.eval_rounds: dict[int, set[int]] = {}
        """Evaluation round -> row numbers admitted."""
        self.evaluated: set[int] = set()
        """Evaluation rounds whose result is known."""
        self.steps = 0
        self.version = -1
        """Newest committed policy version."""
        self.exhausted_at: int | None = None
        """Groups that the newest DataExhausted names."""
        self.step_versions: dict[int, int] = {}
        """Policy version -> optimizer steps behind it (of the newest epoch that made it)."""
        self._ended = False
        """The newest event of the run's life is its end."""
        self._trainer_version = -1
        """Policy version of the trainer's weights, published or not."""
        self._epoch = -1
        self._groups: dict[str, _Group] = {}
        self._lost: dict[str, _Group] = {}
        """Groups whose members are all dead."""
        self._undo: deque[_StepEntry] = deque(maxlen=_UNDO_STEPS)

    @property
    def load(self) -> Load:
        """What pacing needs to know."""
        unpublished = max(0, self._trainer_version - self.version)
        return Load(
            outstanding=len(self._groups),
            steps=self.steps,
            oldest_step=min((g.step for g in self._groups.values()), default=None),
            newest_step=self.steps - unpublished,
        )

    def apply(self, event: object) -> None:
        """Take the next event."""
        match event:
            case r.Prompt():
                self._prompt(event)
            case r.DeadLetter():
                self._bury(event.trajectory_ids)
            case r.DeadLetterSettled() if event.action == "retry":
                self._give_back(event.trajectory_ids)
            case r.VersionManifest() if event.run_id == self._run_id:
                if event.state == "committed":
                    self.step_versions[event.version] = event.step
                    self.version = max(self.version, event.version)
            case r.TrainerStarted() if event.run_id == self._run_id:
                self._trainer_started(event)
            case r.TrainingStep() if event.run_id == self._run_id and event.epoch >= self._epoch:
                self._step(event)
            case r.Evaluation() if event.run_id == self._run_id:
                self.evaluated.add(event.round)
            case r.DataExhausted() if event.run_id == self._run_id:
                self.exhausted_at = event.groups
            case r.RunEnded() if event.run_id == self._run_id:
                self._ended = True
            case _:
                pass

    def _prompt(self, prompt: r.Prompt) -> None:
        if prompt.purpose == "eval":
            self.eval_rounds.setdefault(prompt.epoch, set()).add(prompt.index)
            return
        self.train_fingerprints.add(prompt.dataset)
        self.admitted += 1
        if prompt.epoch > max(self.rows, default=-1):
            self.rows = {prompt.epoch: []}
        if prompt.epoch in self.rows:  # partitions are read one after the other: an older epoch's may come later
            self.rows[prompt.epoch].append(prompt.index)
        members = {r.trajectory_id(prompt.prompt_id, m) for m in range(prompt.group_size)}
        self._groups[prompt.prompt_id] = _Group(self.step_of(prompt.min_version), members)

    def step_of(self, version: int) -> int:
        """Optimizer steps behind a policy version."""
        return self.step_versions.get(version, 0)

    def _trainer_started(self, event: r.TrainerStarted) -> None:
        if event.epoch <= self._epoch:
            return
        self._epoch = event.epoch
        if self._ended:  # resumed, perhaps with more epochs: whether there is more data is said anew
            self._ended, self.exhausted_at = False, None
        while self._undo and self._undo[-1].step > event.step:
            entry = self._undo.pop()
            for group_id, group in entry.closed.items():
                self._groups[group_id] = group
            for trajectory in entry.resolved:
                known = self._groups.get(r.group_id_of(trajectory))
                if known is not None:
                    known.members.add(trajectory)
        self.steps = event.step
        self._trainer_version = event.version

    def _step(self, event: r.TrainingStep) -> None:
        if event.step <= self.steps:
            return
        self.steps = event.step
        self._trainer_version = event.version
        entry = _StepEntry(event.epoch, event.step, [*event.trained, *(d.trajectory_id for d in event.dropped)])
        self._undo.append(entry)
        self._resolve(entry.resolved, entry)

    def _resolve(self, trajectories: Iterable[str], entry: _StepEntry) -> None:
        for trajectory in trajectories:
            group_id = r.group_id_of(trajectory)
            group = self._groups.pop(group_id, None)
            if group is not None:
                entry.closed[group_id] = group

    def _bury(self, trajectories: Iterable[str]) -> None:
        for trajectory in trajectories:
            group_id = r.group_id_of(trajectory)
            group = self._groups.get(group_id)
            if group is None:
                continue
            group.members.discard(trajectory)
            if not group.members:
                self._lost[group_id] = self._groups.pop(group_id)

    def _give_back(self, trajectories: Iterable[str]) -> None:
        for trajectory in trajectories:
            group_id = r.group_id_of(trajectory)
            group = self._groups.get(group_id) or self._lost.pop(group_id, None)
            if group is not None:
                group.members.add(trajectory)
                self._groups[group_id] = group
