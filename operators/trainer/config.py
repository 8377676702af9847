"""Settings of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from laminar.operators.operator import OperatorConfig

__all__ = ["AlgorithmConfig", "CheckpointConfig", "OptimizerConfig", "TrainerConfig"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AlgorithmConfig(_Section):
    """What is learnt from a group of scored trajectories."""

    advantage: Literal["grpo"] = "grpo"
    """``grpo``: reward minus the mean reward of the group's scored members."""
    scale_by_std: bool = False
    """Divide the advantage by the group's standard deviation, as in the GRPO paper."""
    loss: Literal["clip"] = "clip"
    """``clip``: PPO's clipped surrogate with separate bounds (clip-higher), token-mean over the step."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The importance ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The importance ratio is clipped above 1 + clip_high."""
    behaviour_logprobs: Literal["sampler", "trainer"] = "sampler"
    """Denominator of the importance ratio. ``sampler``: the logprob that each token was sampled with. ``trainer``: the
    trainer's own logprob at the start of the step, so that the ratio is 1 and off-policy data is not corrected;
    right only where sampler and trainer hold the same weights."""
    min_group: int = Field(default=2, ge=1)
    """Least number of usable members; with fewer the whole group is dropped with reason ``min_group``."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """A response that ran into its length limit. ``keep``: trained on like any other; ``mask``: counts in the group's
    mean and in the token count, but its tokens give no gradient; ``drop``: as if it had not been sampled."""
    zero_advantage: Literal["drop", "keep"] = "drop"
    """Members whose advantage is 0: dropped before the forward pass, or kept (for the token count)."""


class OptimizerConfig(_Section):
    """AdamW with a learning-rate schedule."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; applied to matrices only, not to biases and norms."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: the peak, or a half cosine down to ``min_lr_ratio`` at the run's last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a part of the peak."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest L2 norm of the whole gradient."""


class CheckpointConfig(_Section):
    """When and where the trainer's state is saved."""

    folder: Path | None = None
    """null: ``checkpoints`` in the run's folder."""
    every: int = Field(default=1, ge=1)
    """Steps between checkpoints; one is also made after the last step and when the trainer is stopped."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that are kept."""


class TrainerConfig(OperatorConfig):
    """Trains the policy on scored groups and publishes every version it makes."""

    kind: Literal["trainer"] = "trainer"
    replicas: Literal[1] = 1
    """There is one trainer; a second one would fence the first."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Budget of one forward pass: rows times the longest row, prompt and padding included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; parameters and optimizer stay float32."""
    recompute: bool = False
    """Keep only what goes into each layer, and compute the layer again in the backward pass: far less memory, a third
    more time, the same gradients."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda``, ``cuda:1``."""
    final_evaluation: bool | None = None
    """Whether the run ends with the result of an evaluation round after its last step; null: if it began with one."""
    final_evaluation_timeout_s: float = Field(default=120.0, gt=0)
    """How long the run's end waits for another answer of the last evaluation round; after that it ends without those
    that are missing. Below ``supervisor.no_progress_timeout_s``, so that the run's end says so."""
    publish_timeout_s: float = Field(default=15.0, gt=0)
    """How long one publication may take before training goes on without it."""
    publish_retry_s: float = Field(default=1.0, gt=0)
    """Time between attempts to publish a version that the relay did not take."""
    log_timeout_s: float = Field(default=60.0, gt=0)
    """How long reading the run's history at the start may take."""
    poll_records: int = Field(default=64, ge=1)
    """Records read from the log at once."""
    warn_unscored: float = Field(default=0.1, ge=0, le=1)
    """Warn when more than this part of a batch has no reward."""
    warn_truncated: float = Field(default=0.5, ge=0, le=1)
    """Warn when more than this part of a batch ran into its length limit."""
