"""What goes wrong, and when: drawn from a seed.

>>> [fault.kind for fault in plan(seed=1, kills=3, instances=("trainer-0", "rollout-0"))]   # doctest: +SKIP
['kill', 'pause', 'kill', 'kill']
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BROKER", "SUPERVISOR", "Fault", "FaultKind", "plan"]

FaultKind = Literal["kill", "pause", "kill_broker", "pause_broker", "broker_away", "disk", "clock", "clock_step"]
"""
``kill``: SIGKILL, of one process or of two at once; ``pause``: SIGSTOP, and SIGCONT after ``seconds``;
``kill_broker``: SIGKILL, started again after ``seconds``; ``pause_broker``: SIGSTOP for ``seconds``; ``broker_away``:
an orderly stop for ``seconds``; ``disk``: no file of the process may grow for ``seconds`` (as on a full disk);
``clock``: the wall clock of the process is set by ``step_s``, then it is killed, so that its successor begins
in the past or in the future; ``clock_step``: it is set while the process runs.
"""

BROKER = "broker"
SUPERVISOR = "supervisor"

_WEIGHTS: dict[FaultKind, float] = {
    "kill": 12.0,
    "pause": 3.0,
    "kill_broker": 0.8,
    "pause_broker": 0.6,
    "disk": 1.0,
    "clock": 0.7,
    "clock_step": 0.7,
}
_PAUSES_S = (5.0, 8.0, 14.0)
"""Past the session timeout; past the lease too; past the transaction timeout too (see deployment)."""
_AWAY_S = 120.0
_KILLS_PER_AWAY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: FaultKind
    targets: tuple[str, ...]
    gap_s: float
    """Time since the fault before it."""
    seconds: float = 0.0
    """How long it lasts."""
    step_s: float = 0.0

    @property
    def kills(self) -> int:
        """How many processes it kills."""
        return len(self.targets) if self.kind in ("kill", "kill_broker", "clock") else 0


def plan(*, seed: int, kills: int, instances: Sequence[str], mean_gap_s: float = 3.5) -> list[Fault]:
    """Faults that kill at least so many processes; the same for the same arguments.

    The broker goes away for two minutes once in 80 kills; the first quarter of a short campaign has one zombie and one
    restart of the broker, whatever the dice say.
    """
    rng = random.Random(seed)
    rollouts = [name for name in instances if name.startswith("rollout")]
    made: list[Fault] = []
    killed = away = 0
    while killed < kills:
        gap_s = min(4 * mean_gap_s, 0.2 + rng.expovariate(1 / mean_gap_s))
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if len(made) == 2:
            kind = "pause"
        elif len(made) == 5:
            kind = "kill_broker"
        if killed >= (away + 0.5) * _KILLS_PER_AWAY and kills >= _KILLS_PER_AWAY:
            away += 1
            kind = "broker_away"
        fault = _fault(kind, gap_s, rng, instances, rollouts)
        killed += fault.kills
        made.append(fault)
    return made


def _fault(
    kind: FaultKind, gap_s: float, rng: random.Random, instances: Sequence[str], rollouts: Sequence[str]
) -> Fault:
    match kind:
        case "kill":
            dice = rng.random()
            if dice < 0.06:
                return Fault(kind=kind, targets=(SUPERVISOR,), gap_s=gap_s, seconds=rng.uniform(0.0, 2.0))
            targets = tuple(rng.sample(list(instances), 2 if dice < 0.25 else 1))
            return Fault(kind=kind, targets=targets, gap_s=gap_s)
        case "pause":
            return Fault(kind=kind, targets=(rng.choice(list(instances)),), gap_s=gap_s, seconds=rng.choice(_PAUSES_S))
        case "kill_broker":
            return Fault(kind=kind, targets=(BROKER,), gap_s=gap_s, seconds=rng.uniform(0.0, 4.0))
        case "pause_broker":
            return Fault(kind=kind, targets=(BROKER,), gap_s=gap_s, seconds=rng.choice(_PAUSES_S))
        case "broker_away":
            return Fault(kind=kind, targets=(BROKER,), gap_s=gap_s, seconds=_AWAY_S)
        case "disk":
            target = rng.choice(["trainer-0", "relay-0", SUPERVISOR])
            return Fault(kind=kind, targets=(target,), gap_s=gap_s, seconds=rng.uniform(3.0, 8.0))
        case "clock" | "clock_step":
            target = rng.choice(rollouts if kind == "clock" else list(instances))
            return Fault(kind=kind, targets=(target,), gap_s=gap_s, step_s=rng.choice((-3600.0, -60.0, 5.0, 60.0)))
