"""Many seeds in a row: what they covered, and for one that fails the command that replays it and the fewest faults."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laminar.pipeline.simulation.codec import SharedCodec
from laminar.pipeline.simulation.fault import Fault
from laminar.pipeline.simulation.run import Outcome, plan, simulate
from laminar.pipeline.simulation.scenario import write_dataset

__all__ = ["KINDS", "Campaign", "Workbench", "failure_text", "replay_command", "shrink", "workbench"]

KINDS: dict[str, tuple[str, ...]] = {
    "crashes before a commit": ("crash at before_commit",),
    "crashes inside a commit": ("crash at inside_commit",),
    "crashes after a commit": ("crash at after_commit",),
    "crashes elsewhere": ("crash at step", "crash at engine", "crash at open"),
    "crashes inside a checkpoint": ("crash at disk",),
    "crashes inside a publication": ("crash at stage", "crash at seal"),
    "zombies": ("zombies",),
    "zombies beyond their session": ("zombies beyond their session",),
    "twins": ("twin",),
    "fenced": ("fenced",),
    "unknown commits, committed": ("unknown commits, committed", "undecided commits, then committed"),
    "unknown commits, not committed": ("unknown commits, lost", "undecided commits, then aborted"),
    "aborts": ("aborts",),
    "broker away": ("away",),
    "cut off from the broker": ("cut",),
    "late fetches": ("late",),
    "changes of consumer groups": ("rebalances",),
    "joined, left, drained": ("join", "leave", "drain"),
    "moves": ("moves",),
    "loads under trajectories": ("loads under trajectories",),
    "trajectories of several versions": ("trajectories of several versions",),
    "adoptions": ("adoptions",),
    "sampled anew": ("sampled anew",),
    "late results": ("late deltas", "late moves", "late ends"),
    "damaged records": ("damage",),
    "dead letters": ("dead letters",),
    "engines that died or stalled": ("engine_crash", "engine_stall"),
    "engines lost": ("engine_lost",),
    "moves out of a lost engine": ("lost",),
    "relay stalled or lost versions": ("relay_stall", "relay_lose"),
    "resumes": ("resumes",),
    "void steps": ("void steps",),
    "optimizer steps": ("steps",),
}
"""What a campaign must have met, and the counters that show it."""

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - checkpoints of a simulation need no disk


@dataclass(frozen=True, slots=True)
class Workbench:
    """What seeds share: a folder with the dataset, and a codec."""

    folder: Path
    codec: SharedCodec

    def run(
        self, seed: int, *, faults: Sequence[Fault] | None = None, tell: Callable[[str], None] | None = None
    ) -> Outcome:
        """One seed."""
        return simulate(seed, self.folder, self.codec, faults=faults, tell=tell)


@contextmanager
def workbench() -> Iterator[Workbench]:
    """A workbench in a temporary folder, in memory where there is such a place."""
    where = _DIRECTORY if _DIRECTORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="laminar-simulation-", dir=where) as name:
        folder = Path(name)
        write_dataset(folder)
        yield Workbench(folder, SharedCodec())


class Campaign:
    """Runs seeds and adds up what happened."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.counts: Counter[str] = Counter()
        self.seeds = 0
        self.failures: list[Outcome] = []

    def run(self, seeds: Iterable[int], *, stop_at_first: bool = False) -> None:
        """All of these seeds, or up to the first that fails."""
        for seed in seeds:
            outcome = self._bench.run(seed)
            self.seeds += 1
            self.counts.update(outcome.counts)
            if outcome.violations:
                self.failures.append(outcome)
                if stop_at_first:
                    return

    def coverage(self) -> dict[str, int]:
        """How often each kind of thing happened."""
        return {kind: sum(self.counts[counter] for counter in counters) for kind, counters in KINDS.items()}


def shrink(bench: Workbench, outcome: Outcome) -> Outcome:
    """The same violation with as few faults as taking them out one by one leads to."""
    rule = outcome.violations[0].rule
    best = outcome
    index = 0
    while index < len(best.faults):
        fewer = [*best.faults[:index], *best.faults[index + 1 :]]
        tried = bench.run(outcome.seed, faults=fewer)
        if tried.violations and tried.violations[0].rule == rule:
            best = tried
        else:
            index += 1
    return best


def replay_command(seed: int) -> str:
    """What a person types to see it again."""
    return f"python -m laminar.pipeline.simulation --seed {seed} --trace"


def failure_text(outcome: Outcome, *, lines: int = 40) -> str:
    """Everything that one needs to begin with."""
    _, drawn = plan(outcome.seed)
    parts = [f"seed {outcome.seed} breaks a rule; again: {replay_command(outcome.seed)}"]
    parts += [f"  {violation}" for violation in outcome.violations[:5]]
    parts += [f"  {outcome.scenario}", f"faults ({len(outcome.faults)} of {len(drawn)} are enough):"]
    parts += [f"  {fault}" for fault in outcome.faults]
    return "\n".join([*parts, "the last events:", *outcome.last][: lines + len(parts)])
