"""The result of an evaluation round."""

from __future__ import annotations

from laminar.operators.trainer.batch import Round
from laminar.operators.trainer.progress import Progress
from laminar.schemas.records import Dropped, Evaluation

__all__ = ["evaluation_of"]


def evaluation_of(known: Round, number: int, *, run_id: str, progress: Progress, now: float) -> Evaluation:
    """The record of round ``number`` from the answers that are there.

    Answers without a reward are resolved as ``unscored`` and enter no mean; dead members are settled by their letter.
    """
    rewards = [a.reward for a in known.answers.values() if a.reward is not None]
    return Evaluation(
        run_id=run_id,
        epoch=progress.epoch,
        step=progress.step,
        round=number,
        version=min((a.version for a in known.answers.values()), default=progress.version),
        reward_mean=sum(rewards) / max(1, len(rewards)),
        n=len(rewards),
        resolved=tuple(
            Dropped(trajectory_id=a.trajectory_id, reason="unscored" if a.reward is None else "eval")
            for a in known.answers.values()
        ),
        at_ms=int(now * 1000),
    )
