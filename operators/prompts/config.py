"""Settings of the prompts operator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from laminar.operators.operator import OperatorConfig

__all__ = ["DataConfig", "PromptsConfig", "SamplingConfig"]


class DataConfig(BaseModel):
    """One dataset: a JSONL or Parquet file, one row a prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: Path
    """``.jsonl`` or ``.parquet``."""
    prompt_field: str = "prompt"
    """Text of the prompt; used when the row has no messages."""
    messages_field: str = "messages"
    """Chat messages, a list of {role, content}; the tokenizer's chat template makes the prompt of them."""
    answer_field: str | None = "answer"
    """Reference answer; null: the rows have none."""
    task_field: str = "task"
    """Optional name of the row's task."""
    task: str = "default"
    """Task of rows without one."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""


class SamplingConfig(BaseModel):
    """How responses are sampled (names as in vLLM)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_tokens: int = Field(default=1024, ge=1)
    """Limit on the tokens of one response."""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 = all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class PromptsConfig(OperatorConfig):
    """Reads datasets and admits groups at the pace of training."""

    kind: Literal["prompts"] = "prompts"
    replicas: Literal[1] = 1
    """There is one: a second one would admit without knowing the bound of the first."""
    train: DataConfig
    """Prompts to train on."""
    eval: DataConfig | None = None
    """Held-out prompts, answered once before the first step and once after the last."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data; null: as many as the run needs."""
    shuffle: bool = True
    """Another order in each epoch, drawn from the run's seed."""
    sampling: SamplingConfig = SamplingConfig()
    """For training prompts."""
    eval_sampling: SamplingConfig | None = None
    """For held-out prompts; null: as for training."""
    max_outstanding_groups: int | None = Field(default=None, ge=1)
    """Admitted groups that are not resolved yet; null: three times ``groups_per_step``."""
    too_long: Literal["refuse", "dead_letter"] = "refuse"
    """A prompt that fills the model's context: refuse to start, or admit it and let it end in ``dead.letters``."""
    rollout: str = "rollout"
    """Name of the operator that consumes the prompts: its lag decides on the partition."""
    batch: int = Field(default=64, ge=1)
    """Prompts in one transaction at most."""
    poll_period_s: float = Field(default=0.05, gt=0)
    """Time between looks at what training has resolved."""
