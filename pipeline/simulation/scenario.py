"""What a seed runs: the shape of the run and of its operators, small enough that a thousand of them take minutes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laminar.operators.prompts.config import DataConfig, PromptsConfig, SamplingConfig
from laminar.operators.repack.config import RepackConfig
from laminar.operators.reward.config import RewardConfig
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.scripted import Answer
from laminar.operators.trainer.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from laminar.schemas.records import UpdateMode

__all__ = ["EVAL_ROWS", "LEASE_S", "SESSION_S", "TRAIN_ROWS", "Scenario", "draw_scenario", "write_dataset"]

SESSION_S = 5.0
"""Of group members."""
LEASE_S = 3.0
"""Of rollouts; repack takes one for dead after as long."""
TRAIN_ROWS = 6
EVAL_ROWS = 2
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int | None
    rollouts: int
    rewards: int
    partitions: Mapping[str, int]
    evaluates: bool
    epochs: int | None
    zero_advantage: str
    checkpoint_every: int
    top_up_lag: int
    max_running: int
    kv_total: int
    tokens_per_s: float
    delta_tokens: int
    delta_s: float
    updates: UpdateMode
    odd_answers: float
    """Part of the trajectories that fail in the engine a few times, for good, are refused, or bring it down."""

    def instances(self) -> list[str]:
        """Every process of the run at its start."""
        rollouts = [f"rollout-{i}" for i in range(self.rollouts)]
        rewards = [f"reward-{i}" for i in range(self.rewards)]
        return ["prompts-0", *rollouts, *rewards, "repack-0", "trainer-0"]

    def prompts(self, folder: Path) -> PromptsConfig:
        """Settings of the prompts operator; ``folder`` holds the dataset."""
        return PromptsConfig(
            train=DataConfig(path=folder / "train.jsonl"),
            eval=DataConfig(path=folder / "eval.jsonl") if self.evaluates else None,
            epochs=self.epochs,
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
            poll_period_s=0.1,
        )

    def rollout(self) -> RolloutConfig:
        """Settings of a rollout."""
        return RolloutConfig(
            updates=self.updates,
            top_up_lag=self.top_up_lag,
            delta_tokens=self.delta_tokens,
            delta_s=self.delta_s,
            finish_s=0.05,
            heartbeat_s=0.6,
            lease_s=LEASE_S,
            load_timeout_s=2.0,
            load_backoff_max_s=1.0,
            poll_s=0.015,
        )

    def repack(self) -> RepackConfig:
        """Settings of repack."""
        return RepackConfig(period_s=1.0, dead_after_s=LEASE_S, release_timeout_s=1.5, version_wait_s=2.0)

    def reward(self) -> RewardConfig:
        """Settings of reward."""
        return RewardConfig(max_in_hand=8)

    def trainer(self) -> TrainerConfig:
        """Settings of the trainer."""
        return TrainerConfig(
            algorithm=AlgorithmConfig.model_validate({"zero_advantage": self.zero_advantage}),
            checkpoint=CheckpointConfig(every=self.checkpoint_every, keep=1),
            publish_timeout_s=2.0,
            publish_retry_s=0.5,
            final_evaluation=self.evaluates,
            final_evaluation_timeout_s=60.0,
        )

    def answer(self, request: EngineRequest) -> Answer:
        """The script: a function of the trajectory alone, so whoever samples it gives the same tokens."""
        rng = random.Random(request.seed)
        n = rng.choice((2, 4, 6, 10, 16, 40))
        ids = tuple(rng.choices(range(5, 200), k=n))
        logprobs = tuple(-0.25 * (i + 1) for i in range(n))
        odd = rng.random()
        if odd < self.odd_answers:
            at = rng.randrange(n)
            if odd < 0.3 * self.odd_answers:
                return Answer(ids=ids, logprobs=logprobs, fail_times=99, fail_at=at)
            if odd < 0.4 * self.odd_answers:
                return Answer(ids=ids, logprobs=logprobs, reject="not to its taste")
            if odd > 0.9 * self.odd_answers:
                return Answer(ids=ids, logprobs=logprobs, lose_at=at)
            return Answer(ids=ids, logprobs=logprobs, fail_times=2, fail_at=at)
        return Answer(ids=ids, logprobs=logprobs)


def draw_scenario(rng: random.Random) -> Scenario:
    """One of many."""
    groups_per_step = rng.choice((1, 2, 2, 3))
    epochs = rng.choice((None, None, 1))
    return Scenario(
        steps=rng.randint(2, 4),
        groups_per_step=groups_per_step,
        group_size=rng.choice((2, 2, 3)),
        max_staleness=rng.choice((None, 0, 1, 2)),
        rollouts=rng.choice((2, 2, 3)),
        rewards=rng.choice((1, 2)),
        partitions={
            "prompts": rng.randint(1, 3),
            "trajectories.partial": rng.randint(1, 2),
            "trajectories.completed": rng.randint(1, 2),
            "trajectories.scored": rng.randint(1, 2),
        },
        evaluates=rng.random() < 0.4,
        epochs=epochs,
        zero_advantage=rng.choice(("keep", "keep", "drop")),
        checkpoint_every=rng.choice((1, 1, 1, 2)),
        top_up_lag=rng.choice((1, 1, 2, 4)),
        max_running=rng.choice((2, 4, 6)),
        kv_total=rng.choice((60, 120, 1000)),
        tokens_per_s=rng.choice((6.0, 12.0, 24.0)),
        delta_tokens=rng.choice((4, 12, 2048)),
        delta_s=rng.choice((0.2, 0.5)),
        odd_answers=rng.choice((0.0, 0.1, 0.3)),
        updates=rng.choice(("pinned", "pinned", "in_flight")),
    )


def write_dataset(folder: Path) -> None:
    """The prompts that every scenario uses."""
    for name, rows in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
        lines = [f'{{"prompt": "{name[0] * 3}{chr(97 + i)}", "answer": "{i}"}}\n' for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
