"""Runs a seed: scenario and faults are drawn from it, the world goes on to the run's end, and all is looked at."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar.pipeline.simulation.burden import held_by
from laminar.pipeline.simulation.clock import EPOCH_S, VirtualClock
from laminar.pipeline.simulation.codec import SharedCodec
from laminar.pipeline.simulation.fault import FAULTS_END_S, Fault, draw_faults
from laminar.pipeline.simulation.scenario import Scenario, draw_scenario
from laminar.pipeline.simulation.trace import Trace
from laminar.pipeline.simulation.violation import Violation
from laminar.pipeline.simulation.world import RUN_ID, World
from laminar.streams.audit import audit
from laminar.streams.deadline import Deadline

__all__ = ["DEADLINE_S", "Outcome", "plan", "simulate"]

DEADLINE_S = FAULTS_END_S + 180.0
"""Virtual seconds in which every run must end."""
_DRAIN_S = 20.0
_QUIET_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    scenario: Scenario
    faults: tuple[Fault, ...]
    violations: tuple[Violation, ...]
    counts: Counter[str]
    digest: str
    """Of everything that happened."""
    last: tuple[str, ...]
    """The newest lines of the trace."""
    seconds: float
    """Virtual time that it took."""


def plan(seed: int) -> tuple[Scenario, list[Fault]]:
    """What a seed stands for."""
    scenario = draw_scenario(random.Random(f"scenario/{seed}"))
    return scenario, draw_faults(random.Random(f"faults/{seed}"), scenario)


def simulate(
    seed: int,
    folder: Path,
    codec: SharedCodec,
    *,
    faults: Sequence[Fault] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """One seed. ``folder`` holds the dataset (``write_dataset``); ``faults``: instead of those that the seed draws."""
    scenario, drawn = plan(seed)
    chosen = drawn if faults is None else list(faults)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    codec.forget()
    clock = VirtualClock()
    trace = Trace(lambda: clock.elapsed, tell=tell)
    world = World(scenario, chosen, seed=seed, folder=folder, codec=codec, trace=trace, clock=clock)
    _run(world)
    counts = world.counts + world.witness.counts + world.course.counts
    counts["rebalances"] = sum(group.revision for group in world.broker.groups.values())
    return Outcome(
        seed, scenario, tuple(chosen), tuple(world.violations), counts, trace.digest, tuple(trace.last), clock.elapsed
    )


def _run(world: World) -> None:
    deadline = EPOCH_S + DEADLINE_S
    while not world.violations and not (_over(world) and _lets_go(world)):
        if not world.turn(deadline):
            world.report("does_not_end", "; ".join(_why(world)))
            return
    if world.violations:
        return
    world.trace.add("", f"the run ended: {world.course.ended.reason if world.course.ended else ''}")
    world.over = True
    world.mishaps.stop()
    world.processes[:] = [process for process in world.processes if process.operator is not None]
    for process in world.processes:
        process.draining = True
    until = world.clock.now + _DRAIN_S
    while world.processes and world.turn(until):
        pass
    for process in world.processes:
        world.report("does_not_drain", process.instance)
    with world.broker.changed:
        for name, hanging in list(world.broker.hanging.items()):
            if not hanging.commits:  # who died inside it is not started any more: the broker ends it at its time-out
                world.broker.decide(name)
    _look_back(world)


def _over(world: World) -> bool:
    """The run has ended, and no trainer is on its way to take that back."""
    trainer = world.current("trainer-0")
    return (
        world.course.ended is not None and trainer is not None and trainer.operator is not None and not trainer.stopped
    )


def _lets_go(world: World) -> bool:
    """Where the run outlasted the faults: once all is quiet, nobody holds anything. True: the run is over indeed."""
    if world.clock.elapsed < FAULTS_END_S:
        return True
    until = world.clock.now + _QUIET_S
    while world.turn(until):
        pass
    for process in world.processes:
        # What was moved after its end is sampled once more for nothing, perhaps beyond the run's end.
        if process.operator is not None and not process.replaced and not world.witness.counts["moved after the end"]:
            held = held_by(process.operator)
            if held:
                world.report("hoards", f"{process.instance} holds {', '.join(held[:5])}")
    return _over(world)


def _look_back(world: World) -> None:
    """The audit, and what must hold at the end."""
    ledger = audit(world.log, world.codec, RUN_ID, deadline=Deadline.after(60.0, "audit"))
    for violation in ledger.violations:
        world.report("audit", str(violation))
    fates = ledger.trained + sum(ledger.dropped.values()) + ledger.dead
    if fates != ledger.admitted or any(ledger.in_flight.values()):
        waiting = "; ".join(world.witness.waiting())
        world.report("unsettled", f"{ledger.admitted} admitted, {fates} settled; {waiting}")
    learnt = world.crew.learnt()
    if learnt != world.course.learnt:
        world.report("wrong_weights", f"learnt {learnt}, the history is {world.course.learnt}")


def _why(world: World) -> list[str]:
    course = world.course
    steps = f"{len(course.steps)} of {world.scenario.steps} steps, versions {sorted(course.published)[-3:]}"
    down = [f"{p.instance} is down" for p in world.processes if p.operator is None]
    return [f"no end within {DEADLINE_S:g} virtual seconds", steps, *down, *world.witness.waiting()[:8]]
