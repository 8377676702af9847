"""What an operator is, and what it is given.

An operator makes progress in small steps that never block for long; the runner owns the loop, the signals and the
waiting (design section 9). So one process can drive many operators under a virtual clock.

>>> class Idle:                                            # doctest: +SKIP
...     def step(self, now: float) -> bool: return False   # nothing to do: the runner waits a little
...     def drain(self, now: float) -> bool: return True   # nothing in hand: may stop
...     def close(self) -> None: ...
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from laminar.operators.measure import Measures
from laminar.schemas.codec import Codec
from laminar.streams.background import Background
from laminar.streams.log import Log

__all__ = ["Context", "ModelConfig", "Operator", "OperatorConfig", "RunInfo"]


class OperatorConfig(BaseModel):
    """Base of every operator's config: frozen, and unknown keys are errors. Subclasses add ``kind: Literal[...]``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    replicas: int = 1
    """How many processes of this operator ``laminar run`` starts."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that each of these processes gets for itself under ``laminar run`` (``CUDA_VISIBLE_DEVICES``). null: all of
    them; none, where another operator of the file has a number. Elsewhere whoever starts the process says it."""


class ModelConfig(BaseModel):
    """The policy model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: Path
    """A Hugging Face model folder (config, safetensors weights, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are published and sampled from."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What every operator of a run agrees on."""

    run_id: str
    run_dir: Path
    steps: int
    """Optimizer steps after which the run ends."""
    groups_per_step: int
    """Groups that one optimizer step consumes."""
    group_size: int
    """Members of a training group."""
    max_staleness: int | None
    """Largest allowed (trainer version - oldest version of a trained trajectory); None = no bound."""
    seed: int
    model: ModelConfig
    partitions: dict[str, int] = field(default_factory=dict)
    """Number of partitions of every topic."""
    max_model_len: int | None = None
    """Prompt and response tokens that every engine of the run file takes; None: it does not say."""

    @property
    def final_round(self) -> int:
        """The evaluation round after the last step (round 0 is before the first): a prolonged run has a new one."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the runner hands to an operator. Everything from outside comes through here, so tests can replace it."""

    run: RunInfo
    name: str
    """The operator's name in the run file: the consumer group is ``{run_id}.{name}``."""
    instance: str
    """``{name}-{index}``: stable over restarts; the transactional id is ``{run_id}.{instance}``."""
    log: Log
    codec: Codec
    clock: Callable[[], float] = time.time
    """Unix epoch seconds."""
    stopwatch: Callable[[], float] = time.perf_counter
    """Seconds since some moment, for durations that are reported."""
    rng: random.Random = field(default_factory=random.Random)
    background: Background | None = None
    """Begins a call beside the step, on a log that bears it; None: everything is done in the step itself."""
    measures: Measures = field(default_factory=Measures)
    """What the operator wants to be seen of itself on ``/metrics``."""

    @property
    def group(self) -> str:
        """The operator's consumer group."""
        return f"{self.run.run_id}.{self.name}"

    @property
    def transactional_id(self) -> str:
        """The process's transactional id."""
        return f"{self.run.run_id}.{self.instance}"


class Operator(Protocol):
    """A long-running piece of the dataflow."""

    def step(self, now: float) -> bool:
        """Do a small piece of work (some milliseconds). ``now`` is Unix epoch seconds.

        True: something was done, call again at once. False: nothing to do now. Raises Retryable (the runner restarts
        the operator's process with back-off) or Fatal (the process exits with a reason).
        """

    def drain(self, now: float) -> bool:
        """Called instead of step once the process was asked to stop; True when nothing is in hand any more."""

    def close(self) -> None:
        """Release everything, without waiting. What was not committed is done again by the next owner."""
