"""From a score to the record on ``trajectories.scored``, with the length policy and the alarms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from laminar.operators.measure import Measures
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.functions import Score, truncation_penalty
from laminar.schemas.records import CompletedTrajectory, ScoredTrajectory

__all__ = ["Scoring"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    seen: int = 0
    truncated: int = 0
    failed: int = 0


class Scoring:
    """Makes scored trajectories and watches the shares of truncated and of unscored ones."""

    def __init__(self, config: RewardConfig, clock: Callable[[], float], measures: Measures) -> None:
        """``clock``: Unix epoch seconds."""
        self._latency_s = measures.histogram("reward_latency_seconds")
        self._config = config
        self._clock = clock
        self._window = _Window()

    def record(self, trajectory: CompletedTrajectory, score: Score, latency_ms: float) -> ScoredTrajectory:
        """The scored trajectory. Evaluation samples are never penalized for their length."""
        reward, components = score.reward, dict(score.components)
        if reward is not None and self._config.on_truncated == "penalty" and trajectory.prompt.purpose == "train":
            penalty = truncation_penalty(
                trajectory, penalty=self._config.penalty, penalty_tokens=self._config.penalty_tokens
            )
            if penalty:
                components["length_penalty"] = -penalty
                reward -= penalty
        self._watch(trajectory, failed=reward is None)
        self._latency_s.observe(latency_ms / 1000)
        return ScoredTrajectory(
            trajectory=trajectory,
            reward=reward,
            failure=score.failure if reward is None else None,
            components=components,
            function=self._config.function,
            latency_ms=latency_ms,
            scored_ms=int(self._clock() * 1000),
            meta=score.meta,
        )

    def _watch(self, trajectory: CompletedTrajectory, *, failed: bool) -> None:
        window = self._window
        window.seen += 1
        window.truncated += trajectory.finish == "length"
        window.failed += failed
        if window.seen < self._config.window:
            return
        if window.truncated > self._config.truncated_alarm * window.seen:
            logger.warning(
                "%d of the last %d trajectories are truncated at %d tokens (alarm above %g of them): raise max_tokens, "
                "or set reward.on_truncated or the trainer's policy",
                window.truncated,
                window.seen,
                trajectory.prompt.sampling.max_tokens,
                self._config.truncated_alarm,
            )
        if window.failed > self._config.failure_alarm * window.seen:
            logger.warning(
                "%d of the last %d trajectories have no reward (alarm above %g of them); the failures are on %s",
                window.failed,
                window.seen,
                self._config.failure_alarm,
                "trajectories.scored",
            )
        self._window = _Window()
