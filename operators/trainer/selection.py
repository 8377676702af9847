"""What an optimizer step does with each member of its groups: trained, or dropped with a reason.

Guarantees: every scored member gets exactly one fate. A dead or unscored member enters no mean, no standard deviation
and no denominator (F1, F4). A group counts as consumed whatever becomes of its members, so a step never starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from laminar.operators.trainer.advantage import group_advantages
from laminar.operators.trainer.batch import Group
from laminar.operators.trainer.config import AlgorithmConfig
from laminar.schemas.records import CompletedTrajectory, Dropped, DropReason, ScoredTrajectory

__all__ = ["Batch", "Sample", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory that is trained on."""

    trajectory: CompletedTrajectory
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step is made from."""

    samples: tuple[Sample, ...]
    dropped: tuple[Dropped, ...]
    denominator: int
    """Sampled response tokens of the samples and of masked members, counted before masking; at least 1."""
    n_tokens: int
    """Sampled response tokens of the samples."""
    staleness: Mapping[str, int]
    """Versions -> number of samples."""
    metrics: Mapping[str, float]


def select(groups: Sequence[Group], *, version: int, max_staleness: int | None, config: AlgorithmConfig) -> Batch:
    """The batch of these groups for a trainer at policy version ``version``."""
    samples: list[Sample] = []
    dropped: list[Dropped] = []
    masked_tokens = 0

    def drop(member: ScoredTrajectory, reason: DropReason) -> None:
        dropped.append(Dropped(trajectory_id=member.trajectory.trajectory_id, reason=reason))

    for group in groups:
        usable: list[tuple[ScoredTrajectory, float]] = []
        for arrival in group.scored:
            member = arrival.scored
            if member.reward is None:
                drop(member, "unscored")
            elif max_staleness is not None and version - member.trajectory.version_min > max_staleness:
                drop(member, "stale")
            elif config.truncated == "drop" and member.trajectory.finish == "length":
                drop(member, "truncated")
            else:
                usable.append((member, member.reward))
        if len(usable) < config.min_group:
            for member, _ in usable:
                drop(member, "min_group")
            continue
        advantages = group_advantages([reward for _, reward in usable], scale_by_std=config.scale_by_std)
        for (member, _), advantage in zip(usable, advantages, strict=True):
            if config.truncated == "mask" and member.trajectory.finish == "length":
                drop(member, "truncated")
                masked_tokens += sampled_tokens(member.trajectory)
            elif config.zero_advantage == "drop" and advantage == 0.0:
                drop(member, "zero_advantage")
            else:
                samples.append(Sample(trajectory=member.trajectory, advantage=advantage))
    n_tokens = sum(sampled_tokens(s.trajectory) for s in samples)
    stale = Counter(version - s.trajectory.version_min for s in samples)
    return Batch(
        samples=tuple(samples),
        dropped=tuple(dropped),
        denominator=max(1, n_tokens + masked_tokens),
        n_tokens=n_tokens,
        staleness={str(lag): stale[lag] for lag in sorted(stale)},
        metrics={**_metrics(groups, len(samples), stale), **_versions(samples, version)},
    )


def sampled_tokens(trajectory: CompletedTrajectory) -> int:
    """Response tokens that the policy sampled (not those of tools or environments)."""
    return int(trajectory.response.mask_T.sum())


def _metrics(groups: Sequence[Group], kept: int, stale: Mapping[int, int]) -> dict[str, float]:
    scored = [arrival.scored for group in groups for arrival in group.scored]
    rewards = [s.reward for s in scored if s.reward is not None]
    n = max(1, len(scored))
    return {
        "groups": float(len(groups)),
        "reward_mean": sum(rewards) / max(1, len(rewards)),
        "kept_fraction": kept / n,
        "unscored_fraction": (len(scored) - len(rewards)) / n,
        "truncated_fraction": sum(s.trajectory.finish == "length" for s in scored) / n,
        "response_len_mean": sum(s.trajectory.response.n_tokens for s in scored) / n,
        "staleness_mean": sum(lag * count for lag, count in stale.items()) / max(1, kept),
        "staleness_max": float(max(stale, default=0)),
    }


def _versions(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How many versions are in a trajectory, and how old its tokens are (case C2): its oldest one says neither."""
    n_versions = n_tokens = lag = 0
    for sample in samples:
        sampled_T = sample.trajectory.response.versions_T[sample.trajectory.response.mask_T != 0]
        mixed = sample.trajectory.version_min != sample.trajectory.version_max
        n_versions += len(np.unique(sampled_T)) if mixed else 1
        n_tokens += len(sampled_T)
        lag += version * len(sampled_T) - int(sampled_T.sum(dtype=np.int64))
    return {
        "versions_mean": n_versions / max(1, len(samples)),
        "staleness_token_mean": lag / max(1, n_tokens),
    }
