"""The record of an optimizer step, and what a person is told about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.selection import Batch
from laminar.schemas.records import TrainingStep
from laminar.streams.log import TopicPartition

__all__ = ["report", "training_step"]

logger = logging.getLogger(__name__)


def training_step(
    after: Progress,
    batch: Batch,
    *,
    run_id: str,
    metrics: Mapping[str, float],
    offsets: Mapping[TopicPartition, int],
    duration_ms: float,
    now: float,
) -> TrainingStep:
    """The record of the step that led to ``after``. ``metrics`` come on top of the batch's own."""
    return TrainingStep(
        run_id=run_id,
        epoch=after.epoch,
        step=after.step,
        version=after.version,
        trained=tuple(s.trajectory.trajectory_id for s in batch.samples),
        dropped=batch.dropped,
        staleness=batch.staleness,
        metrics={
            **batch.metrics,
            **metrics,
            "n_tokens": float(batch.n_tokens),
            "late": float(after.assembly.late),
            "duplicates": float(after.assembly.duplicates),
        },
        offsets={str(partition): offset for partition, offset in offsets.items()},
        n_tokens=batch.n_tokens,
        duration_ms=duration_ms,
        at_ms=int(now * 1000),
    )


def report(record: TrainingStep, config: TrainerConfig) -> None:
    """One line for each step, and a warning for each rate above its limit (F4, F7)."""
    metrics = record.metrics
    logger.info(
        "step %d: version %d, reward %.3f, loss %.4f, %d of %d trajectories kept, staleness %.1f (max %d)",
        record.step,
        record.version,
        metrics["reward_mean"],
        metrics.get("loss", 0.0),
        len(record.trained),
        len(record.trained) + len(record.dropped),
        metrics["staleness_mean"],
        int(metrics["staleness_max"]),
    )
    for name, limit in (
        ("unscored_fraction", config.warn_unscored),
        ("truncated_fraction", config.warn_truncated),
    ):
        if metrics[name] > limit:
            logger.warning("step %d: %s is %.2f (limit %g)", record.step, name, metrics[name], limit)
