"""Rollouts over the memory log under a virtual clock: what the rollout tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.operators.weights import TensorView
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from laminar.streams.background import Background
from laminar.streams.deadline import Deadline
from laminar.streams.memory import Faults, MemoryLog, NoFaults, Point
from laminar.streams.reading import Tail
from tests.support.dataflow import World, make_prompt, make_tokens

__all__ = ["FailingCommits", "RelayStandIn", "Stage", "ten"]

T = TypeVar("T")


def ten(n: int = 10, **changes: Any) -> Answer:
    """An answer of ``n`` tokens, 100, 101, ..."""
    return Answer(ids=tuple(range(100, 100 + n)), **changes)


class RelayStandIn:
    """A WeightSource without bytes; versions in ``missing`` are on no relay, those in ``coming`` on their way."""

    def __init__(self) -> None:
        self.missing: set[int] = set()
        self.coming: set[int] = set()
        self.opened: list[int] = []

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        self.opened.append(manifest.version)
        if manifest.version in self.missing:
            raise Unavailable(f"no relay has version {manifest.version}")
        yield {}

    def fetch(self, newest: r.VersionManifest) -> r.VersionManifest | None:
        if newest.version in self.missing:
            raise Unavailable(f"no relay has version {newest.version}")
        return None if newest.version in self.coming else newest


class FailingCommits(NoFaults):
    """Raises ``error`` at the next ``times`` commits."""

    def __init__(self) -> None:
        self.error: Callable[[str], Exception] | None = None
        self.times = 0
        self.point: Point = "before_commit"

    def next(self, error: Callable[[str], Exception], times: int = 1, point: Point = "before_commit") -> None:
        self.error, self.times, self.point = error, times, point

    def at(self, point: Point, transactional_id: str) -> None:
        if self.times and self.error is not None and point == self.point:
            self.times -= 1
            raise self.error(f"scripted at {point} of {transactional_id}")


class Stage:
    """One world with rollouts in it."""

    def __init__(self) -> None:
        self.world = World(group_size=4)
        self.weights = RelayStandIn()
        self._tails: dict[str, Tail] = {}
        self._seen: dict[str, list[object]] = {}

    def rollout(
        self,
        index: int = 0,
        *,
        engine: ScriptedEngine | None = None,
        faults: Faults | None = None,
        background: Background | None = None,
        **config: Any,
    ) -> Rollout:
        """A rollout that works eagerly: no waiting for others before a commit, one token a step."""
        settings: dict[str, Any] = {"poll_s": 0.0, "finish_s": 0.0, "delta_s": 0.05, "lease_s": 1000.0}
        context = replace(self.world.context("rollout"), instance=f"rollout-{index}", background=background)
        if faults is not None:
            assert isinstance(self.world.log, MemoryLog)
            handle = MemoryLog(clock=context.clock, broker=self.world.log.broker, faults=faults)
            context = replace(context, log=handle)
        self.world.advance(0.001)
        return Rollout(
            RolloutConfig(**{**settings, **config}),
            context,
            engine=engine if engine is not None else ScriptedEngine(always(ten()), max_running=8),
            weights=self.weights,
        )

    def publish(self, version: int, *, epoch: int = 1, state: r.VersionState = "committed") -> None:
        """Write a manifest."""
        self.world.write(
            r.VersionManifest(
                run_id="run",
                epoch=epoch,
                version=version,
                parent=version - 1,
                step=version,
                state=state,
                tensors=(),
                total_bytes=0,
                chunk_bytes=4096,
                chunk_digests=b"",
                root_digest="",
                relay_id="relay-0",
                relay_url="",
                relay_boot="boot",
                at_ms=self.world.now_ms,
            )
        )

    def prompts(self, n: int, *, first: int = 0, **changes: Any) -> list[r.Prompt]:
        """Write ``n`` groups."""
        made = [make_prompt(index, **changes) for index in range(first, first + n)]
        self.world.write(*made)
        return made

    def adopt(
        self,
        rollout: Rollout,
        *,
        version: int,
        index: int = 50,
        attempt: int = 1,
        n: int = 5,
        first: int = 5,
        **prompt: Any,
    ) -> str:
        """Tell it to go on with member 0 of a group from a dead rollout: so many tokens of the version, ``first``..."""
        group = make_prompt(index, group_size=1, **prompt)
        snapshot = r.Snapshot(
            trajectory_id=r.trajectory_id(group.prompt_id, 0),
            attempt=attempt,
            member=0,
            prompt=group,
            response=make_tokens(n, version, first=first),
            version=version,
            seed=1,
            timings=r.Timings(),
        )
        self.world.write(
            r.AdoptCommand(
                rollout_id="rollout-0",
                incarnation=rollout.incarnation,
                reason="dead",
                from_rollout="rollout-9",
                snapshot=snapshot,
                at_ms=self.world.now_ms,
            )
        )
        return snapshot.trajectory_id

    def run(self, seconds: float, *operators: Any, tick_s: float = 0.01) -> None:
        """Step all of them, in turn, while time passes."""
        end = self.world.now + seconds
        while self.world.now < end:
            for operator in operators:
                operator.step(self.world.now)
            self.world.advance(tick_s)

    def until(self, holds: Callable[[], bool], *operators: Any, limit_s: float = 20.0) -> None:
        """Step until something holds."""
        end = self.world.now + limit_s
        while not holds():
            assert self.world.now < end, "it never came to hold"
            self.run(0.01, *operators)

    # -- what stands in the log

    def read(self, topic: str, kind: type[T]) -> list[T]:
        """All records of a type on a topic, in the order in which they became visible."""
        if topic not in self._tails:
            self._tails[topic], self._seen[topic] = Tail(self.world.log, [topic]), []
        while records := self._tails[topic].poll():
            self._seen[topic] += [self.world.codec.decode(record.value or b"") for record in records]
        return [one for one in self._seen[topic] if isinstance(one, kind)]

    def completed(self) -> dict[str, r.CompletedTrajectory]:
        """By trajectory id; each may stand there once."""
        found = self.read("trajectories.completed", r.CompletedTrajectory)
        assert len({one.trajectory_id for one in found}) == len(found), "completed twice"
        return {one.trajectory_id: one for one in found}

    def partial(self, trajectory_id: str) -> list[Any]:
        """The life of one trajectory."""
        return [e for e in self.read("trajectories.partial", object) if e.trajectory_id == trajectory_id]  # type: ignore[attr-defined]

    def status(self, index: int = 0) -> r.RolloutStatus:
        """The newest heartbeat."""
        return [s for s in self.read("rollouts.status", r.RolloutStatus) if s.rollout_id == f"rollout-{index}"][-1]

    def letters(self) -> list[r.DeadLetter]:
        return self.read("dead.letters", r.DeadLetter)
