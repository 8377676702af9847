"""What can be set about a rollout.

>>> RolloutConfig(engine={"kind": "scripted"}).engine.kind
'scripted'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from laminar.operators.operator import OperatorConfig
from laminar.operators.rollout.engines.vllm_names import check_arguments, environment
from laminar.schemas.records import UpdateMode

__all__ = [
    "EngineConfig",
    "RolloutConfig",
    "ScriptedEngineConfig",
    "SelfCheckConfig",
    "TorchEngineConfig",
    "VllmEngineConfig",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _ProcessSettings(_Section):
    """Where an engine lives, and how its process is looked after if it has one of its own."""

    process: Literal["own", "shared"] = "shared"
    """``own``: the engine has a process of its own, which decodes while the operator is busy, and is started anew when
    it dies or hangs. ``shared``: it lives in the operator's process. The settings below are of its own process."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """An engine that is not ready by then has failed to start."""
    hung_after_s: float = Field(default=60.0, gt=0)
    """A process that has work, and reported nothing for so long, is killed and started anew."""
    load_hung_after_s: float = Field(default=300.0, gt=0)
    """The same while it loads weights."""
    restart_backoff_s: float = Field(default=0.5, gt=0)
    """Wait before the engine is started anew; doubles with each time, until it has lived for a minute."""
    restart_backoff_max_s: float = Field(default=30.0, gt=0)
    """Longest such wait."""
    start_attempts: int = Field(default=5, ge=1)
    """After so many failed starts in a row the rollout gives up, and its process starts anew. An engine that is lost
    before it has sampled a token counts as well."""


class TorchEngineConfig(_ProcessSettings):
    """Any Hugging Face causal language model on CPU or GPU, with continuous batching."""

    kind: Literal["torch"] = "torch"
    device: str = "auto"
    """``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ..."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and response tokens of one sequence; null: what the model's config allows."""
    kv_total: int | None = Field(default=None, ge=2)
    """Tokens in the KV cache; null: ``max_running`` sequences of ``max_model_len``."""
    threads: int = Field(default=1, ge=1)
    """CPU threads that torch uses."""
    steps_per_poll: int = Field(default=4, ge=1)
    """Tokens decoded per sequence before the rollout looks at its commands again."""


class VllmEngineConfig(_ProcessSettings):
    """vLLM, for every model that it serves, on GPU or CPU."""

    kind: Literal["vllm"] = "vllm"
    process: Literal["own", "shared"] = "own"
    """``own``: the engine has a process of its own, which decodes while the operator is busy, and is started anew when
    it dies or hangs. ``shared``: it lives in the operator's process. ``start_timeout_s`` and so on are for ``own``."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together (vLLM's ``max_num_seqs``)."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and response tokens of one sequence; null: what the model's config allows."""
    kv_total: int | None = Field(default=None, ge=1)
    """Tokens in the KV cache, rounded down to whole blocks; null: on a GPU what vLLM finds room for, on a CPU
    ``max_running`` sequences of ``max_model_len``, in a quarter of the free memory at most."""
    threads: int = Field(default=1, ge=1)
    """CPU threads that torch uses."""
    steps_per_poll: int = Field(default=16, ge=1)
    """Tokens decoded per sequence, at most, before the rollout looks at its commands again: it does so after 15 ms, or
    after a single step that takes longer."""
    args: Mapping[str, Any] = Field(default_factory=dict)
    """Anything else that vLLM's engine takes, under its own names (fields of ``EngineArgs``). On a CPU
    ``enforce_eager`` is true, ``block_size`` 32 and ``enable_chunked_prefill`` false unless given."""
    env: Mapping[str, str] = Field(default_factory=dict, validate_default=True)
    """Environment variables of the process that runs vLLM. Those given are added to the ones that it needs."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        check_arguments(value)
        return value

    @field_validator("env")
    @classmethod
    def _with_defaults(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        return environment(value)


class ScriptedEngineConfig(_ProcessSettings):
    """No model: responses of random tokens and length, drawn from the prompt and the seed.

    For trying a deployment (brokers, supervisors, faults) without a GPU; whatever fails and is resumed, a prompt's
    answers stay the same token for token.
    """

    kind: Literal["scripted"] = "scripted"
    min_tokens: int = Field(default=4, ge=1)
    """Shortest response."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest response (lengths are log-uniform)."""
    vocab_size: int = Field(default=256, ge=1)
    """Token ids are below this."""
    tokens_per_s: float = Field(default=1000.0, gt=0)
    """Of each running sequence."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    max_model_len: int = Field(default=4096, ge=2)
    """Prompt and response tokens of one sequence."""
    kv_total: int = Field(default=65536, ge=2)
    """Tokens in the KV cache."""
    deadly: tuple[str, ...] = ()
    """Trajectories, as ``EPOCH/INDEX/MEMBER``, that end the whole process with their first token: to see what becomes
    of them (a dead letter, after repack's ``max_owner_deaths``), and of what was sampled beside them."""


EngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig | ScriptedEngineConfig, Field(discriminator="kind")]
"""What samples."""


class SelfCheckConfig(_Section):
    """Whether the engine's logprobs are the trainer's: some tokens after each load, compared with what came along."""

    every: int = Field(default=1, ge=0)
    """Loads from one check to the next; the first after the engine's start always is. 0: no checks."""
    tolerance: float | None = Field(default=None, gt=0)
    """Nats that the logprob of one token may differ by, and their mean by a fifth of it; null: 0.0003 in float32, 1.5
    where weights or the trainer's forward pass are of fewer bits."""
    timeout_s: float = Field(default=30.0, gt=0)
    """An engine that has not answered by then has failed."""


class RolloutConfig(OperatorConfig):
    """Samples the groups of ``prompts`` under the newest policy version."""

    kind: Literal["rollout"] = "rollout"
    engine: EngineConfig = TorchEngineConfig()
    """What samples: ``torch``, ``vllm`` or ``scripted``."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Trajectories in hand at once; null: the engine's ``max_running``. A larger group is taken when nothing is.
    What is above ``max_running`` waits in the engine, and is filled up once half of it is free."""
    updates: UpdateMode = "pinned"
    """``pinned``: new weights are loaded with nothing in the engine, so each trajectory has one policy version.
    ``in_flight``: as soon as they are there; what is being sampled goes on under them, and each token has its own."""
    top_up_lag: int | None = Field(default=None, ge=1)
    """New groups are taken while the version held lags the newest by less than this. 1: only under the newest; null: 1
    where ``updates`` is ``pinned``, else 2 (also while the next version is on its way)."""
    member_attempts: int = Field(default=3, ge=1)
    """How often a trajectory that fails in the engine is tried before it becomes a dead letter."""
    self_check: SelfCheckConfig = SelfCheckConfig()
    """When the engine's logprobs are compared with the trainer's. A mismatch: nothing of it is written, and it is
    started anew."""
    delta_tokens: int = Field(default=16384, ge=1)
    """New tokens of all trajectories together go to ``trajectories.partial`` when there are so many, ..."""
    delta_s: float = Field(default=0.5, ge=0)
    """... or when the oldest has waited so long: what a crash can lose, beside the 0.1 to 0.3 s for which vLLM's tokens
    wait in the engine."""
    finish_s: float = Field(default=0.1, ge=0)
    """How long a finished trajectory may wait for others to share its transaction. The last one in hand never does."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two records on ``rollouts.status``; a change of state is announced at once."""
    lease_s: float = Field(default=10.0, gt=0)
    """A process that could not write a heartbeat for so long gives up what it has in hand, since repack has given it to
    others by then; at most repack's ``dead_after_s``. Polls of the engine that take more than a third of it lengthen
    it, for repack too. One that gets no weights for so long leaves its prompts to others."""
    poll_s: float = Field(default=0.05, ge=0)
    """Seconds between looks at commands, versions and prompts; at most 15 ms after a response has ended, if the engine
    has room for more then."""
    load_timeout_s: float = Field(default=8.0, gt=0)
    """Deadline of one attempt to get new weights. The rollout does nothing else meanwhile, unless ``updates`` is
    ``in_flight``: below ``lease_s``."""
    load_backoff_s: float = Field(default=0.2, gt=0)
    """Wait after a failed attempt to get weights; doubles with each failure."""
    load_backoff_max_s: float = Field(default=5.0, gt=0)
    """Longest such wait."""
    old_version_timeout_s: float = Field(default=1.0, gt=0)
    """Deadline of one attempt to get an older version, which an adopted trajectory needs (``pinned``)."""
    old_version_attempts: int = Field(default=3, ge=1)
    """After so many failures the trajectories that wait for the version are handed back (``in_flight``: for a newer
    one)."""

    @property
    def checks(self) -> SelfCheckConfig:
        """``self_check``; none for an engine without a model, whose logprobs are no trainer's."""
        return SelfCheckConfig(every=0) if self.engine.kind == "scripted" else self.self_check
