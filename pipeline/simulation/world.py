"""One seed's world: every process over one memory log, one clock, and who goes on next.

A process steps, takes a drawn time for it, and waits a little longer each time it found nothing to do, as the runner
lets it. Nothing waits in real time. A process that is stopped inside a step (a pause, a slow relay) stays on the call
stack while the others go on inside that call, and wakes up with all it had in its head.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from laminar.operators.operator import ModelConfig, RunInfo
from laminar.pipeline.simulation.clock import EPOCH_S, VirtualClock
from laminar.pipeline.simulation.codec import SharedCodec
from laminar.pipeline.simulation.course import Course
from laminar.pipeline.simulation.crew import Crew
from laminar.pipeline.simulation.fault import ARMED, FAULTS_END_S, Crash, Fault, Kind
from laminar.pipeline.simulation.mishap import Mishaps
from laminar.pipeline.simulation.process import Process, Reach
from laminar.pipeline.simulation.relay import Relay
from laminar.pipeline.simulation.scenario import LEASE_S, SESSION_S, Scenario
from laminar.pipeline.simulation.trace import Trace
from laminar.pipeline.simulation.violation import Violation
from laminar.pipeline.simulation.witness import Witness
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, DecodeError, Evicted, Fatal, Fenced, LaminarError, Retryable, Unavailable
from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.memory import MemoryBroker, MemoryLog, Undecided
from laminar.streams.topics import topic_specs

__all__ = ["RUN_ID", "World"]

RUN_ID = "run"
_IDLE_S = (0.02, 0.32)
_DEPTH = 3
_MAX_TURNS = 60_000


class _Broker(MemoryBroker):
    """Tells the world what was committed."""

    world: World

    def append(self, records: Mapping[TopicPartition, Sequence[OutRecord]]) -> None:
        super().append(records)
        self.world.committed(records)


class World:
    """See the module's docstring."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Sequence[Fault],
        *,
        seed: int,
        folder: Path,
        codec: SharedCodec,
        trace: Trace,
        clock: VirtualClock,
    ) -> None:
        """``folder`` holds the dataset, and is where checkpoints go."""
        self.scenario = scenario
        self.codec = codec
        self.clock = clock
        self.trace = trace
        self.rng = random.Random(f"order/{seed}")
        self.counts: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.durable = 0
        self.course = Course(scenario, lambda: self.durable, self.report)
        self.witness = Witness(scenario, self.course, self.report)
        self.broker = _Broker(clock)
        self.broker.world = self
        self.broker_back_at = 0.0
        self.ambush: Fault | None = None
        """Waits for the next command."""
        self.relay = Relay()
        self.run = RunInfo(
            run_id=RUN_ID,
            run_dir=folder,
            steps=scenario.steps,
            groups_per_step=scenario.groups_per_step,
            group_size=scenario.group_size,
            max_staleness=scenario.max_staleness,
            seed=seed,
            model=ModelConfig(path=folder),
        )
        self.log = MemoryLog(broker=self.broker)
        self.log.create_topics(topic_specs(scenario.partitions))
        self.crew = Crew(self, folder)
        self.mishaps = Mishaps(self, [fault for fault in faults if fault.kind not in ARMED])
        self.faults_end_at = EPOCH_S + FAULTS_END_S
        self.processes: list[Process] = []
        self._armed = [fault for fault in faults if fault.kind in ARMED]
        self._depth = 0
        self._turns = 0
        self.over = False
        """The run has ended: nobody is started again."""
        for instance in scenario.instances():
            self.add(instance, self.rng.uniform(0.0, 0.3))

    # -- what is said

    def report(self, rule: str, detail: str) -> None:
        """A rule is broken."""
        self.violations.append(Violation(rule, detail, self.clock.elapsed))
        self.trace.add("!", f"{rule}: {detail}")

    def committed(self, records: Mapping[TopicPartition, Sequence[OutRecord]]) -> None:
        """A transaction became visible."""
        told: list[str] = []
        for where, bucket in records.items():
            end = self.broker.partitions[where].end
            for offset, record in enumerate(bucket, end - len(bucket)):
                value = record.value or b""
                self.trace.mix(value)
                try:
                    event = self.codec.decode(value)
                except DecodeError:
                    told.append(f"{where}@{offset} damaged")
                    continue
                told.append(f"{type(event).__name__} {where.topic}[{where.partition}]@{offset}")
                self.witness.see(event)
                if self.ambush is not None and isinstance(event, r.ReleaseCommand | r.AdoptCommand):
                    self._lie_in_wait(self.ambush, event.rollout_id)
        self.trace.add("  log", ", ".join(told))

    def _lie_in_wait(self, ambush: Fault, rollout_id: str) -> None:
        process = self.current(rollout_id)
        if process is not None:
            self.ambush = None
            kind: Kind = "crash" if ambush.coin and ambush.point == "inside_commit" else "pause"
            process.armed.insert(0, replace(ambush, kind=kind, target=rollout_id))

    # -- processes

    def add(self, instance: str, delay_s: float) -> Process:
        """A new process, which starts a little later."""
        armed = [fault for fault in self._armed if fault.target == instance]
        process = Process(
            instance, Reach(lambda point: self.point(process, point), self.clock, lambda: self.broker_back_at), armed
        )
        process.next_at = self.clock.now + delay_s
        self.processes.append(process)
        return process

    def current(self, instance: str) -> Process | None:
        """The newest process of this name."""
        return next((p for p in reversed(self.processes) if p.instance == instance and not p.replaced), None)

    def end(self, process: Process, why: str, restart_s: float | None, *, close: bool) -> None:
        """The process is gone; its supervisor starts the next one after ``restart_s`` (None: never)."""
        self.trace.add(process.instance, why)
        operator, process.operator = process.operator, None
        if close and operator is not None:
            try:
                operator.close()
            except Retryable as error:
                self.trace.add(process.instance, f"closing: {error}")
        if process in self.processes:
            self.processes.remove(process)
        if restart_s is not None and not process.replaced and not self.over:
            new = self.add(process.instance, restart_s)
            new.armed[:] = process.armed
            new.reach.cut_until, new.reach.late_until = process.reach.cut_until, process.reach.late_until

    # -- time

    def turn(self, until: float) -> bool:
        """Let the next process step, or the next mishap happen; False when none is due before ``until``."""
        ready = [p for p in self.processes if not p.stopped]
        process = min(ready, key=lambda p: p.next_at, default=None)
        due = self.mishaps.next_at()
        at = min(due, process.next_at if process is not None else due)
        if at > until or self._turns >= _MAX_TURNS:
            return False
        self._turns += 1
        self.clock.reach(at)
        if process is None or due <= process.next_at:
            self.mishaps.happen()
        else:
            self._step(process)
        return True

    def wait(self, process: Process, seconds: float) -> None:
        """The process is stopped inside what it does; the others go on."""
        until = self.clock.now + seconds
        if self._depth >= _DEPTH:
            self.clock.reach(until)  # nobody goes on: it is as if all were stopped for that long
            return
        self._depth += 1
        process.stopped = True
        try:
            while self.turn(until):
                pass
        finally:
            process.stopped = False
            self._depth -= 1
        self.clock.reach(until)

    def point(self, process: Process, point: str) -> None:
        """The process comes by a point where it can be struck."""
        if not process.armed:
            return
        now = self.clock.elapsed
        for index, fault in enumerate(process.armed):
            if fault.point != point or now < fault.at or now > FAULTS_END_S:
                continue
            if fault.skip:
                self._skip(process, index, fault)
                return
            del process.armed[index]
            self._strike(process, fault)
            return

    def _skip(self, process: Process, index: int, fault: Fault) -> None:
        process.armed[index] = replace(fault, skip=fault.skip - 1)

    def _strike(self, process: Process, fault: Fault) -> None:
        self.trace.add(process.instance, f"** {fault}")
        kind = fault.kind
        if kind == "crash":
            self.counts[f"crash at {fault.point}"] += 1
            raise Crash(fault.seconds)
        if kind == "pause":
            self.counts[f"pause at {fault.point}"] += 1
            self.wait(process, fault.seconds)
            if fault.seconds > LEASE_S:
                self.counts["zombies"] += 1
            if fault.seconds > SESSION_S:
                self.counts["zombies beyond their session"] += 1
            self.trace.add(process.instance, "wakes up")
            return
        if kind == "abort":
            self.counts["aborts"] += 1
            raise Aborted("the broker aborted the transaction")
        if kind == "unknown":
            self.counts[f"unknown commits, {'committed' if fault.point == 'after_commit' else 'lost'}"] += 1
            raise Unavailable("no answer to the commit")
        self.counts[f"undecided commits, then {'committed' if fault.coin else 'aborted'}"] += 1
        raise Undecided("no answer to the commit yet", commits=fault.coin, due=self.clock.now + fault.seconds)

    # -- one step

    def _step(self, process: Process) -> None:
        if process.operator is None:
            self._start(process)
            return
        worked = False
        done = False
        try:
            self.point(process, "step")
            if process.operator is None:
                return
            if process.draining:
                done = process.operator.drain(self.clock.now)
            else:
                worked = process.operator.step(self.clock.now)
        except Crash as crash:
            self.end(process, "died", crash.restart_s, close=False)
            return
        except LaminarError as error:
            self._failed(process, error)
            return
        if done:
            self.end(process, "drained", self.mishaps.back_in(process), close=True)
            return
        took = self.rng.uniform(0.0005, 0.004)
        low, high = _IDLE_S
        process.idle_s = 0.0 if worked else min(high, max(low, process.idle_s * 2))
        process.next_at = self.clock.now + took + process.idle_s * self.rng.uniform(0.7, 1.0)

    def _start(self, process: Process) -> None:
        try:
            self.crew.start(process)
        except Crash as crash:
            self.end(process, "died while it started", crash.restart_s, close=False)
        except LaminarError as error:
            self._failed(process, error)
        else:
            self.trace.add(process.instance, "starts")
            process.next_at = self.clock.now + self.rng.uniform(0.001, 0.01)

    def _failed(self, process: Process, error: LaminarError) -> None:
        name = type(error).__name__
        if isinstance(error, Fenced):
            self.counts["fenced"] += 1
        elif isinstance(error, Fatal):
            self.report("fatal", f"{process.instance}: {name}: {error}")
        else:
            self.counts["evicted" if isinstance(error, Evicted) else "restarts after an error"] += 1
        self.end(process, f"leaves: {name}: {error}", self.rng.uniform(0.1, 0.6), close=True)
