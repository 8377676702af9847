"""Faults: what goes wrong, to whom, when. A seed draws a list of them; taking some out of the list shrinks a failure.

Some are *armed*: they strike when the target next comes by a point (a transaction, a poll of the engine, an operation
of a checkpoint, ...) after their time. The others happen at their time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from laminar.operators.rollout.engines.scripted_absence import Call
from laminar.pipeline.simulation.scenario import LEASE_S, SESSION_S, Scenario

__all__ = ["ARMED", "FAULTS_END_S", "Crash", "Fault", "Kind", "Point", "draw_faults"]

FAULTS_END_S = 16.0
"""From then on nothing goes wrong any more, seconds after the start."""

Point = Literal["step", "before_commit", "inside_commit", "after_commit", "engine", "open", "stage", "seal", "disk"]
"""Where a process can be struck. ``step``: between two steps; ``open``: while a rollout maps weights; ``stage``,
``seal``: of a version's weights; ``disk``: after an operation of a checkpoint's save."""

Kind = Literal[
    "crash", "pause", "abort", "unknown", "undecided",
    "ambush", "away", "cut", "damage", "drain", "engine_crash", "engine_lost", "engine_stall", "join", "late",
    "leave", "relay_lose", "relay_stall", "twin",
]  # fmt: skip

ARMED: frozenset[str] = frozenset({"crash", "pause", "abort", "unknown", "undecided"})

_COMMIT: tuple[Point, ...] = ("before_commit", "inside_commit", "after_commit")
_TOPICS = (
    "prompts", "trajectories.partial", "trajectories.completed", "trajectories.scored", "weights.versions",
    "rollouts.status", "rollouts.commands", "training.steps", "dead.letters",
)  # fmt: skip


class Crash(BaseException):
    """The process dies here, without a word."""

    def __init__(self, restart_s: float) -> None:
        super().__init__("crashed")
        self.restart_s = restart_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them."""

    at: float
    """Seconds after the start."""
    kind: Kind
    target: str = ""
    """A process, or nothing."""
    point: Point = "step"
    """Of an armed fault."""
    seconds: float = 0.0
    """How long it lasts; of a crash: until the process is back."""
    topic: str = ""
    skip: int = 0
    """An armed fault lets so many chances pass."""
    call: Call = "any"
    """At which call of the engine its loss is noticed."""
    coin: bool = False
    """What an undecided transaction becomes, and other details."""

    def __str__(self) -> str:
        more = [self.target, self.point if self.kind in ARMED else "", self.topic]
        more += [f"in {self.call}" if self.kind == "engine_lost" else ""]
        more += [f"{self.seconds:.2f} s" if self.seconds else "", f"skip {self.skip}" if self.skip else ""]
        return f"{self.at:6.2f} {self.kind} {' '.join(part for part in more if part)}"


def draw_faults(rng: random.Random, scenario: Scenario) -> list[Fault]:
    """Some to a dozen, by time."""
    instances = scenario.instances()
    faults = [_draw(rng, instances) for _ in range(rng.randint(2, 14))]
    faults += [_draw_loss(rng, instances) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
    return sorted(faults, key=lambda fault: fault.at)


def _draw(rng: random.Random, instances: Sequence[str]) -> Fault:
    at = rng.uniform(0.0, 1.0) ** 1.5 * (FAULTS_END_S - 4.0)
    kind: Kind = rng.choices(
        ("crash", "pause", "abort", "unknown", "undecided", "ambush", "away", "cut", "damage", "drain", "engine_crash",
         "engine_stall", "join", "late", "leave", "relay_lose", "relay_stall", "twin"),
        (25, 16, 4, 8, 8, 4, 2, 5, 5, 3, 3, 2, 2, 6, 2, 2, 3, 5),
    )[0]  # fmt: skip
    # Rollouts and the trainer have most to lose.
    target = rng.choice([*instances, *(i for i in instances if i[:7] in ("rollout", "trainer"))])
    coin = rng.random() < 0.5
    long = rng.choice((0.3, 1.0, LEASE_S + 0.2, LEASE_S + 1.5, SESSION_S + 1.0, SESSION_S + 3.0))
    skip = rng.choice((0, 0, 0, 1, 2, 3))
    match kind:
        case "crash":
            point, skip = _point(rng, target, skip)
            return Fault(at=at, kind=kind, target=target, point=point, seconds=long / 2, skip=skip)
        case "pause":
            point, skip = _point(rng, target, skip)
            return Fault(at=at, kind=kind, target=target, point=point, seconds=long, skip=skip)
        case "abort":
            return Fault(at=at, kind=kind, target=target, point="before_commit", skip=skip)
        case "unknown":
            point = "after_commit" if coin else "inside_commit"
            return Fault(at=at, kind=kind, target=target, point=point, skip=skip)
        case "undecided":
            return Fault(at=at, kind=kind, target=target, point="inside_commit", seconds=long, skip=skip, coin=coin)
        case "ambush":  # whoever gets the next command is stopped, or dies, in the transaction that answers it
            point = rng.choice(("before_commit", "inside_commit"))
            return Fault(at=at, kind=kind, point=point, seconds=long, coin=coin)
        case "away":
            return Fault(at=at, kind=kind, seconds=long / 2)
        case "cut":
            return Fault(at=at, kind=kind, target=target, seconds=long)
        case "late":
            return Fault(at=at, kind=kind, target=target, topic=rng.choice(_TOPICS), seconds=long)
        case "damage":
            return Fault(at=at, kind=kind, topic=rng.choice(_TOPICS), skip=rng.randrange(4))
        case "engine_crash" | "engine_stall":
            rollouts = [i for i in instances if i.startswith("rollout")]
            return Fault(at=at, kind=kind, target=rng.choice(rollouts), seconds=long)
        case "join" | "leave":
            name = rng.choice(("rollout", "reward"))
            return Fault(at=at, kind=kind, target=f"{name}-{3 if kind == 'join' else 0}", seconds=long)
        case "relay_stall" | "relay_lose":
            return Fault(at=at, kind=kind, seconds=long, coin=coin)
        case _:  # twin, drain
            return Fault(at=at, kind=kind, target=target, seconds=long / 4)


def _draw_loss(rng: random.Random, instances: Sequence[str]) -> Fault:
    """An engine in a process of its own dies."""
    return Fault(
        at=rng.uniform(0.5, FAULTS_END_S - 4.0),
        kind="engine_lost",
        target=rng.choice([i for i in instances if i.startswith("rollout")]),
        call=rng.choice(("any", "poll", "poll", "poll", "submit", "abort", "load", "stats", "decode")),
        skip=rng.choice((0, 0, 1, 2, 5)),
        seconds=rng.choice((0.05, 0.5, LEASE_S + 0.5, SESSION_S + 1.0)),
    )


def _point(rng: random.Random, target: str, skip: int) -> tuple[Point, int]:
    name = target.rsplit("-", 1)[0]
    special: tuple[Point, ...] = {"rollout": ("engine", "open"), "trainer": ("stage", "seal", "disk")}.get(name, ())  # type: ignore[assignment]
    point = rng.choice((*_COMMIT, *_COMMIT, "step", *special))
    return point, rng.randrange(9) if point == "disk" else skip
