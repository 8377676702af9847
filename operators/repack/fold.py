"""The partial response pool, folded from ``trajectories.partial``.

The fold is a pure state machine: ``apply(event, partition, offset)`` in log order gives the trajectories that are still
alive, each with its owner and everything sampled so far. Guarantees:

* Events of an attempt older than the newest known are ignored and counted in ``late``.
* A delta is appended only where its ``start`` equals the number of tokens known.
* ``resume_offsets`` is, per partition, the lowest first offset of any trajectory still alive (or the next offset):
  folding from there gives the same living trajectories, so a restart costs what is in flight, not the run's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laminar.schemas import records as r
from laminar.schemas.tokens import EMPTY, Tokens
from laminar.streams.log import TopicPartition

__all__ = ["POOL", "Alive", "PartialPool"]

POOL = 0
"""Incarnation of no process: what was handed back, or retried by a person, waits there."""


@dataclass(slots=True)
class Alive:
    """A trajectory that has started and not ended."""

    trajectory_id: str
    member: int
    prompt: r.Prompt
    attempt: int
    owner: tuple[str, int]
    """(rollout id, incarnation)."""
    seed: int
    started_ms: int
    source: TopicPartition
    first_offset: int
    first_token_ms: int = 0
    moves: int = 0
    refused: int = 0
    """Handbacks since the last token."""
    deaths: int = 0
    """Owners in a row that died with it in hand and had not brought it one token further."""
    reached: int = 0
    """The most response tokens that it had when it changed its owner."""
    parts: list[Tokens] = field(default_factory=list)
    n_response: int = 0

    @property
    def version(self) -> int:
        """Policy version of the tokens so far; -1 while there are none."""
        return int(self.parts[-1].versions_T[-1]) if self.n_response else -1

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens."""
        return self.prompt.n_prompt_tokens + self.n_response

    def deaths_by(self, *, dead: bool) -> int:
        """``deaths`` once its present owner loses it; ``dead``: by dying, if there is an owner."""
        if self.n_response > self.reached:
            return 0
        return self.deaths + (dead and self.owner[1] != POOL)

    def response(self) -> Tokens:
        """Everything sampled so far."""
        return Tokens.concat(self.parts) if self.parts else EMPTY

    def cut(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` response tokens."""
        if n_tokens < self.n_response:
            kept = self.response()[:n_tokens]
            self.parts = [kept] if n_tokens else []
            self.n_response = n_tokens

    def snapshot(self, *, attempt: int, version: int, keep_tokens: bool) -> r.Snapshot:
        """What a new owner needs."""
        return r.Snapshot(
            trajectory_id=self.trajectory_id,
            attempt=attempt,
            member=self.member,
            prompt=self.prompt,
            response=self.response() if keep_tokens else EMPTY,
            version=version,
            seed=self.seed,
            timings=r.Timings(
                admitted_ms=self.prompt.created_ms,
                started_ms=self.started_ms,
                first_token_ms=self.first_token_ms if keep_tokens else 0,
                moves=self.moves + 1,
            ),
        )


class PartialPool:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.alive: dict[str, Alive] = {}
        self.late = 0
        """Events of an older attempt, ignored."""

    def apply(self, event: object, source: TopicPartition, offset: int) -> None:
        """Take the next record of a partition."""
        match event:
            case r.TrajectoryStarted():
                self._started(event, source, offset)
            case r.TrajectoryTokens():
                self._tokens(event)
            case r.TrajectoryMoved():
                self._moved(event)
            case r.TrajectoryEnded():
                self._ended(event)
            case _:
                pass

    def resume_offsets(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Where a restarted fold has to begin, given the reader's present positions."""
        lowest = dict(positions)
        for one in self.alive.values():
            lowest[one.source] = min(lowest.get(one.source, one.first_offset), one.first_offset)
        return lowest

    def _started(self, event: r.TrajectoryStarted, source: TopicPartition, offset: int) -> None:
        known = self.alive.get(event.trajectory_id)
        if known is not None and event.attempt <= known.attempt:
            self.late += 1
            return
        self.alive[event.trajectory_id] = Alive(
            trajectory_id=event.trajectory_id,
            member=event.member,
            prompt=event.prompt,
            attempt=event.attempt,
            owner=(event.rollout_id, event.incarnation),
            seed=event.seed,
            started_ms=event.at_ms,
            source=source,
            first_offset=known.first_offset if known else offset,
            moves=known.moves if known else 0,
        )

    def _tokens(self, event: r.TrajectoryTokens) -> None:
        known = self.alive.get(event.trajectory_id)
        if known is None:
            return
        if event.attempt != known.attempt or event.start != known.n_response:
            self.late += 1
            return
        if event.tokens.n_tokens:
            known.parts.append(event.tokens)
            known.n_response += event.tokens.n_tokens
            known.refused = 0
            if not known.first_token_ms:
                known.first_token_ms = event.at_ms
            if len(known.parts) > 64:
                known.parts = [known.response()]

    def _moved(self, event: r.TrajectoryMoved) -> None:
        known = self.alive.get(event.trajectory_id)
        if known is None:
            return
        if event.attempt <= known.attempt:
            self.late += 1
            return
        known.attempt = event.attempt
        known.deaths = known.deaths_by(dead=event.reason in ("dead", "lost"))
        known.reached = max(known.reached, known.n_response)
        known.owner = (event.to_rollout, event.to_incarnation)
        known.moves += 1
        known.refused = known.refused + 1 if event.reason == "handback" else known.refused
        known.cut(event.n_tokens)

    def _ended(self, event: r.TrajectoryEnded) -> None:
        known = self.alive.get(event.trajectory_id)
        if known is None:
            return
        if event.attempt < known.attempt:
            self.late += 1
            return
        del self.alive[event.trajectory_id]
