"""The run's course: what was admitted, trained, voided and published, and whether the trainer keeps its order.

Rules by name::

    too_many_admitted      outstanding groups are bounded
    lost_step, old_trainer steps are consecutive, and only the newest trainer writes them
    trained_twice, stale   in the history that survives, and within the bound
    untrained_resume       a trainer resumes at what its checkpoint holds, no more and no less
    early_checkpoint       no checkpoint holds a step that is not recorded
    early_version          no version is committed whose step is not durable
    wrong_weights          a version's weights have learnt exactly the history up to its step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from laminar.pipeline.simulation.learner import digest_of
from laminar.pipeline.simulation.scenario import Scenario
from laminar.schemas import records as r

__all__ = ["Course"]


class Course:
    """See the module's docstring."""

    def __init__(self, scenario: Scenario, durable: Callable[[], int], report: Callable[[str, str], None]) -> None:
        """``durable`` says which step the newest complete checkpoint holds."""
        self._scenario = scenario
        self._durable = durable
        self._report = report
        self.counts: Counter[str] = Counter()
        self.settled: dict[str, str] = {}
        """Member -> its fate in the history that survives."""
        self.published: set[int] = set()
        """Versions that were committed."""
        self.steps: list[r.TrainingStep] = []
        """Those that survive."""
        self.ended: r.RunEnded | None = None
        self.epoch = -1
        self._version = -1
        self._groups: dict[str, set[str]] = {}
        """Training groups -> members without a fate; those with none left are gone."""
        self._sizes: dict[str, list[str]] = {}
        self._returned = 0
        """Groups that a resumed trainer has made outstanding again."""

    @property
    def learnt(self) -> list[str]:
        """What the surviving history was trained on, in order."""
        return [name for step in self.steps for name in step.trained]

    def admitted(self, prompt: r.Prompt, names: Sequence[str]) -> None:
        """A group came."""
        if prompt.purpose != "train":
            return
        self._groups[prompt.prompt_id] = set(names)
        self._sizes[prompt.prompt_id] = list(names)
        scenario, n = self._scenario, len(self._groups)
        if n > 3 * scenario.groups_per_step + self._returned:
            self._report("too_many_admitted", f"{prompt.prompt_id}: {n} groups are outstanding")
        if n > (scenario.steps - len(self.steps)) * scenario.groups_per_step:
            self._report("too_many_admitted", f"{prompt.prompt_id}: {n} groups at step {len(self.steps)}")

    def dead(self, names: Iterable[str]) -> None:
        """Members got a dead letter."""
        for name in names:
            self._settle(name, "dead")

    def see(self, record: r.Record) -> None:
        """Records of ``training.steps`` and ``weights.versions``."""
        match record:
            case r.TrainerStarted():
                self._started(record)
            case r.TrainingStep():
                self._step(record)
            case r.VersionManifest() if record.state == "committed":
                self._version_committed(record)
            case r.Evaluation():
                for one in record.resolved:
                    self._settle(one.trajectory_id, one.reason)
            case r.RunEnded():
                self.ended = record
                self._owner("RunEnded", record.epoch)
            case _:
                pass

    def _settle(self, name: str, fate: str) -> None:
        known = self.settled.get(name)
        if known is not None and fate == "trained" and known != "dead":
            self._report("trained_twice", f"{name}: {known}, and now {fate}")
        if known is None or known == "dead":
            self.settled[name] = fate
        group = self._groups.get(r.group_id_of(name))
        if group is not None:
            group.discard(name)
            if not group:
                del self._groups[r.group_id_of(name)]

    def _owner(self, what: str, epoch: int) -> None:
        if epoch != self.epoch:
            self._report("old_trainer", f"{what} of epoch {epoch}, the newest is {self.epoch}")

    def _started(self, event: r.TrainerStarted) -> None:
        if event.epoch <= self.epoch:
            self._report("old_trainer", f"TrainerStarted of epoch {event.epoch} after {self.epoch}")
        self.counts["resumes"] += self.epoch >= 0
        self.epoch, self.ended = event.epoch, None
        self._take_version("TrainerStarted", event.version)
        if event.step > len(self.steps):
            self._report("untrained_resume", f"resumed at step {event.step}, {len(self.steps)} are recorded")
        if event.step != self._durable():
            self._report("untrained_resume", f"resumed at step {event.step}, durable is {self._durable()}")
        while len(self.steps) > event.step:
            step = self.steps.pop()
            self.counts["void steps"] += 1
            for name in (*step.trained, *(d.trajectory_id for d in step.dropped)):
                if self.settled.pop(name, None) is None:
                    continue
                group_id = r.group_id_of(name)
                if group_id in self._sizes:
                    self._returned += group_id not in self._groups
                    self._groups.setdefault(group_id, set()).add(name)

    def _take_version(self, what: str, version: int) -> None:
        if version <= self._version:
            self._report("version_again", f"{what}: version {version} after {self._version}")
        self._version = max(version, self._version)

    def _step(self, step: r.TrainingStep) -> None:
        self._owner(f"step {step.step}", step.epoch)
        self._take_version(f"step {step.step}", step.version)
        if step.step != len(self.steps) + 1:
            self._report("lost_step", f"step {step.step} after {len(self.steps)}")
        if self._durable() >= step.step:
            self._report("early_checkpoint", f"step {step.step} is durable before it is recorded")
        self.steps.append(step)
        self.counts["steps"] += 1
        for name in step.trained:
            self._settle(name, "trained")
        for one in step.dropped:
            self._settle(one.trajectory_id, one.reason)
        bound = self._scenario.max_staleness
        oldest = max(map(int, step.staleness), default=0)
        if bound is not None and oldest > bound:
            self._report("stale", f"step {step.step} was trained on {oldest} versions old, {bound} are allowed")

    def _version_committed(self, manifest: r.VersionManifest) -> None:
        self._owner(f"version {manifest.version}", manifest.epoch)
        if manifest.version in self.published:
            self.counts["published again"] += 1
        self.published.add(manifest.version)
        self.counts["versions"] += 1
        every = self._scenario.checkpoint_every
        if manifest.step % every == 0 and self._durable() < manifest.step:
            self._report("early_version", f"version {manifest.version} of step {manifest.step} is not durable")
        learnt = [name for step in self.steps[: manifest.step] for name in step.trained]
        if manifest.root_digest != digest_of(learnt):
            self._report("wrong_weights", f"version {manifest.version} has not learnt what step {manifest.step} has")
