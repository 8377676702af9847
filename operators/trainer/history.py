"""What the log says about the run so far: a fold of ``training.steps`` and ``weights.versions``.

>>> history = fold(History(), TrainerStarted(run_id="r", epoch=3, ...), run_id="r")     # doctest: +SKIP
>>> history.epoch
3
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laminar.schemas import records as r

__all__ = ["History", "fold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Nothing, before anything was folded."""

    epoch: int = -1
    """Highest trainer epoch."""
    version: int = -1
    """Highest policy version that was ever given away, published or not."""
    step: int = 0
    """Optimizer steps that are not void."""
    evaluated: frozenset[int] = frozenset()
    """Evaluation rounds whose result is written."""
    exhausted_groups: int | None = None
    """Training groups in all, once ``prompts`` has said that no other will follow."""


def fold(history: History, record: object, *, run_id: str) -> History:
    """The history with one more record. Records of other runs and other kinds change nothing."""
    match record:
        case r.TrainerStarted() if record.run_id == run_id:
            return replace(
                history,
                epoch=max(history.epoch, record.epoch),
                version=max(history.version, record.version),
                step=record.step,
            )
        case r.TrainingStep() if record.run_id == run_id:
            return replace(
                history,
                epoch=max(history.epoch, record.epoch),
                version=max(history.version, record.version),
                step=record.step,
            )
        case r.VersionManifest() if record.run_id == run_id:
            return replace(
                history, epoch=max(history.epoch, record.epoch), version=max(history.version, record.version)
            )
        case r.Evaluation() if record.run_id == run_id:
            return replace(history, evaluated=history.evaluated | {record.round})
        case r.DataExhausted() if record.run_id == run_id:
            return replace(history, exhausted_groups=record.groups)
        case r.RunEnded() if record.run_id == run_id:
            return replace(history, exhausted_groups=None)  # prompts says it anew to a resumed trainer
        case _:
            return history
