"""The reward operator: finished trajectories in, scored trajectories out, exactly once.

``exact`` and ``number`` run in the step itself; a function of one's own runs in processes (``pool.py``), so that a step
never waits for it: a call of 30 s holds its partition and nothing else. A failure is a null reward with its reason,
never a 0.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from laminar.operators.operator import Context
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.functions import BUILT_IN
from laminar.operators.reward.pool import Pool
from laminar.operators.reward.scoring import Scoring
from laminar.schemas.errors import ConfigError, InvalidRecord
from laminar.schemas.records import CompletedTrajectory, Record, ScoredTrajectory
from laminar.streams.deadline import Deadline
from laminar.streams.loop import Loop
from laminar.streams.worker import Inline, Result, Worker

__all__ = ["build"]


def build(config: RewardConfig, context: Context) -> Loop:
    """The operator. Raises ConfigError when the function cannot be imported or does not take the options."""
    scoring, where = Scoring(config, context.clock, context.measures), f"operators.{context.name}"
    if config.function in BUILT_IN:
        worker = _built_in(config, scoring, where, context.stopwatch)
    else:
        worker = _pooled(config, scoring, where)
    try:
        return Loop(
            log=context.log,
            codec=context.codec,
            name=context.name,
            group=context.group,
            instance=context.instance,
            transactional_id=context.transactional_id,
            topics=["trajectories.completed"],
            worker=worker,
            max_in_hand=config.max_in_hand,
            max_in_hand_bytes=config.max_in_hand_bytes,
            revoke_s=config.revoke_s,
            outage_s=config.outage_s,
            on_lost_offsets=config.on_lost_offsets,
            stopwatch=context.stopwatch,
            background=context.background,
        )
    except BaseException:
        worker.close()
        raise


def _built_in(config: RewardConfig, scoring: Scoring, where: str, stopwatch: Callable[[], float]) -> Worker:
    function = BUILT_IN[config.function]
    valid = {name: p for name, p in signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    types = get_type_hints(function)
    options: dict[str, Any] = {}
    for name, value in config.options.items():
        if name not in valid:
            raise ConfigError(f"{where}.options: unknown '{name}' (valid for {config.function}: {', '.join(valid)})")
        try:
            options[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{where}.options.{name}: {error.errors()[0]['msg']}, not {value!r}") from None

    def score(record: Record) -> list[ScoredTrajectory]:
        trajectory = _completed(record)
        start = stopwatch()
        found = function(trajectory, **options)
        return [scoring.record(trajectory, found, (stopwatch() - start) * 1e3)]

    return Inline(score)


def _pooled(config: RewardConfig, scoring: Scoring, where: str) -> Worker:
    pool = Pool(
        config.function,
        options=config.options,
        concurrency=config.concurrency,
        timeout_s=config.timeout_s,
        max_attempts=config.max_attempts,
        startup_timeout_s=config.startup_timeout_s,
    )
    try:
        pool.start(Deadline.after(config.startup_timeout_s, "reward function"))
    except ConfigError as error:
        pool.close()
        raise ConfigError(f"{where}.function: {error}") from None
    except BaseException:
        pool.close()
        raise
    return _Pooled(pool, scoring)


def _completed(record: Record) -> CompletedTrajectory:
    if not isinstance(record, CompletedTrajectory):
        raise InvalidRecord(f"a {type(record).__name__} cannot be scored (valid: CompletedTrajectory)")
    return record


class _Pooled:
    """The pool as the loop's worker."""

    def __init__(self, pool: Pool, scoring: Scoring) -> None:
        self._pool = pool
        self._scoring = scoring
        self._calls: dict[int, CompletedTrajectory] = {}
        self._refused: list[Result] = []

    def submit(self, ticket: int, record: Record) -> None:
        try:
            self._calls[ticket] = _completed(record)
        except InvalidRecord as error:
            self._refused.append(Result(ticket=ticket, error=error))
        else:
            self._pool.submit(ticket, self._calls[ticket])

    def collect(self) -> list[Result]:
        results, self._refused = self._refused, []
        for ticket, answer in self._pool.collect():
            trajectory = self._calls.pop(ticket, None)
            if trajectory is not None:
                scored = self._scoring.record(trajectory, answer.score, answer.latency_ms)
                results.append(Result(ticket=ticket, outputs=(scored,)))
        return results

    def cancel(self, ticket: int) -> None:
        self._calls.pop(ticket, None)
        self._pool.cancel(ticket)

    def close(self) -> None:
        self._calls.clear()
        self._pool.close()
