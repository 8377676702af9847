"""What a run came to: ``summary.json`` in its folder, and the closing report on the terminal.

Counts come from the topics alone (so they hold over restarts and resumes), times from the process that asks.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from laminar.pipeline.view import RunFold, Staleness
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError
from laminar.schemas.records import CompletedTrajectory, TrajectoryMoved
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log
from laminar.streams.reading import read_topic

__all__ = ["LedgerCounts", "Summary", "Totals", "closing_report", "count_totals", "write_summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The conservation law, as the audit finds it."""

    trained: int
    dropped: dict[str, int]
    dead: int
    in_flight: int
    balanced: bool

    @classmethod
    def of(cls, ledger: Ledger) -> LedgerCounts:
        """The audit's result, without its stages and violations."""
        return cls(
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            dead=ledger.dead,
            in_flight=sum(ledger.in_flight.values()),
            balanced=ledger.balanced,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counted over the trajectory topics."""

    trajectories: int
    """Finished ones."""
    tokens: int
    """Response tokens of these."""
    moves: int
    """Changes of owner between live rollouts."""
    adoptions: int
    """Changes of owner after a rollout had died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``summary.json``; the field names are its keys."""

    accuracy_before: float | None
    """Mean reward on held-out prompts before the first step; None without evaluation."""
    accuracy_after: float | None
    steps: int
    trajectories: int
    tokens: int
    wall_s: float
    moves: int
    adoptions: int
    restarts: int
    max_versions_per_trajectory: int
    staleness: Staleness
    ledger: LedgerCounts
    exit_reason: str

    @classmethod
    def of(
        cls, fold: RunFold, totals: Totals, ledger: Ledger, *, wall_s: float, restarts: int, exit_reason: str
    ) -> Summary:
        """Put together."""
        return cls(
            accuracy_before=fold.accuracy_before,
            accuracy_after=fold.accuracy_after,
            steps=fold.step,
            trajectories=totals.trajectories,
            tokens=totals.tokens,
            wall_s=round(wall_s, 3),
            moves=totals.moves,
            adoptions=totals.adoptions,
            restarts=restarts,
            max_versions_per_trajectory=ledger.max_versions_per_trajectory,
            staleness=Staleness.of(ledger.staleness),
            ledger=LedgerCounts.of(ledger),
            exit_reason=exit_reason,
        )


def count_totals(log: Log, codec: Codec, deadline: Deadline) -> Totals:
    """One pass over ``trajectories.completed`` and the moves on ``trajectories.partial``. Raises DeadlineExceeded."""
    trajectories = tokens = 0
    for record in read_topic(log, "trajectories.completed", deadline):
        done = _decoded(codec, record.value)
        if isinstance(done, CompletedTrajectory):
            trajectories += 1
            tokens += done.response.n_tokens
    reasons: Counter[str] = Counter()
    for record in read_topic(log, "trajectories.partial", deadline):
        schema = codec.schema_of(record.value or b"")
        if schema is not None and schema.name == TrajectoryMoved.__name__:
            moved = _decoded(codec, record.value)
            if isinstance(moved, TrajectoryMoved):
                reasons[moved.reason] += 1
    return Totals(
        trajectories=trajectories,
        tokens=tokens,
        moves=sum(reasons.values()) - reasons["dead"],
        adoptions=reasons["dead"],
    )


def _decoded(codec: Codec, value: bytes | None) -> object:
    try:
        return codec.decode(value or b"")
    except DecodeError:
        return None  # the audit reports it


def write_summary(path: Path, summary: Summary) -> None:
    """Write it whole or not at all."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def closing_report(
    summary: Summary, *, run_dir: Path, config: str, finished: bool, overrides: Sequence[str] = ()
) -> str:
    """What a person reads at the end, with what to type next. ``overrides``: what stood behind ``config``."""
    kept = [shlex.quote(one) for one in overrides if not (finished and one.startswith("steps="))]
    again = " ".join(["laminar run", config, *kept])
    ledger, stale = summary.ledger, summary.staleness
    fates = [f"{ledger.trained} trained", *(f"{n} {reason}" for reason, n in sorted(ledger.dropped.items()))]
    fates += [f"{ledger.dead} dead", f"{ledger.in_flight} in flight"]
    lines = [
        "",
        f"{'Finished' if finished else 'Stopped'}: {summary.exit_reason}",
        f"  accuracy     {_percent(summary.accuracy_before)} -> {_percent(summary.accuracy_after)} on held-out prompts",
        f"  steps        {summary.steps} in {summary.wall_s:.0f} s, {summary.restarts} restarts",
        f"  sampled      {_sampled(summary)}",
        f"  staleness    mean {stale.mean:.2f}, p99 {stale.p99}, max {stale.max} versions",
        f"  ledger       {', '.join(fates)}: {'balanced' if ledger.balanced else 'NOT BALANCED'}",
        "",
        "Next:",
        f"  laminar audit {run_dir}",
        f"  laminar read {run_dir} trajectories.scored --offset -1",
    ]
    lines.append(
        f"  {again} steps={summary.steps * 2 or 1}    # goes on where this ended"
        if finished
        else f"  {again}    # goes on where this stopped; logs: {run_dir / 'logs'}"
    )
    return "\n".join(lines)


def _sampled(summary: Summary) -> str:
    versions = summary.max_versions_per_trajectory
    return (
        f"{summary.trajectories} trajectories, {summary.tokens} tokens; {summary.moves} moved,"
        f" {summary.adoptions} adopted; at most {versions} version{'' if versions == 1 else 's'} in one"
    )


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f} %"
