"""The lives of trajectories as the log tells them: every token once, in order, and one end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from laminar.operators.repack.fold import PartialPool
from laminar.schemas import records as r
from laminar.streams.log import TopicPartition

__all__ = ["read_lives"]

_SOURCE = TopicPartition("trajectories.partial", 0)


def read_lives(
    events: Iterable[object], completed: Mapping[str, r.CompletedTrajectory], *, late: bool = False
) -> dict[str, list[object]]:
    """The events of each trajectory, in order. Fails where a token is missing or stands there twice, where a result is
    not what its deltas said, and where one ended twice. ``late``: an owner that was given up may still have spoken."""
    found: dict[str, list[object]] = {}
    pool = PartialPool()
    for event in events:
        name = event.trajectory_id  # type: ignore[attr-defined]
        found.setdefault(name, []).append(event)
        one = pool.alive.get(name)
        if isinstance(event, r.TrajectoryStarted):
            assert one is None, f"{name} started twice"
        elif late and (one is None or event.attempt < one.attempt):  # type: ignore[attr-defined]
            continue
        elif isinstance(event, r.TrajectoryTokens):
            assert one is not None, f"{name}: tokens behind its end"
            assert (event.attempt, event.start) == (one.attempt, one.n_response), f"{name}: tokens lost or repeated"
        elif isinstance(event, r.TrajectoryMoved):
            assert one is not None, f"{name}: moved behind its end"
            assert event.attempt > one.attempt, f"{name}: given away twice"
            assert event.n_tokens == one.n_response or event.reason == "dead", f"{name}: moved without its tokens"
        elif isinstance(event, r.TrajectoryEnded):
            assert one is not None, f"{name} ended twice"
            known, made = one.response(), completed.get(name)
            assert made is None or made.response[: known.n_tokens] == known, f"{name}: not what its deltas said"
        pool.apply(event, _SOURCE, 0)
    assert late or pool.late == 0
    return found
