"""Every record that travels on the log, as frozen dataclasses.

One class a record, one ``.avsc`` a record and version in ``schemas/avro/``. Times are Unix epoch milliseconds
(``_ms``); durations carry their unit. Ids are deterministic (design section 2)::

    prompt_id     = {dataset fingerprint}/{epoch}/{index}        also the group id
    trajectory_id = {prompt_id}/{member}                          member in 0 .. group_size - 1

>>> trajectory_id("9f3a/0/17", 3)
'9f3a/0/17/3'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laminar.schemas.tokens import Tokens

__all__ = [
    "AdoptCommand",
    "CompletedTrajectory",
    "DataExhausted",
    "DeadLetter",
    "DrainCommand",
    "Dropped",
    "DropReason",
    "Evaluation",
    "FinishReason",
    "Header",
    "InFlight",
    "MoveReason",
    "Prompt",
    "Purpose",
    "Record",
    "RelayStatus",
    "ReleaseCommand",
    "RolloutState",
    "RolloutStatus",
    "RunEnded",
    "Sampling",
    "ScoredTrajectory",
    "Snapshot",
    "TensorEntry",
    "Timings",
    "TrainerStarted",
    "TrainingStep",
    "TrajectoryEnded",
    "TrajectoryMoved",
    "TrajectoryStarted",
    "TrajectoryTokens",
    "VersionManifest",
    "VersionState",
    "HeldVersion",
    "group_id_of",
    "trajectory_id",
]

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
"""``stop``: an end token or stop string was sampled; ``length``: max_tokens or the model's limit was reached."""
MoveReason = Literal["repack", "dead", "handback", "drain"]
RolloutState = Literal["starting", "idle", "sampling", "loading", "draining"]
VersionState = Literal["prepared", "committed"]
DropReason = Literal["eval", "stale", "zero_advantage", "unscored", "min_group", "duplicate", "truncated"]
"""Why a finished member was not trained on. ``eval``: it was for evaluation; ``unscored``: its reward is null."""


def trajectory_id(prompt_id: str, member: int) -> str:
    """The id of one member of a group."""
    return f"{prompt_id}/{member}"


def group_id_of(trajectory: str) -> str:
    """The group id (= prompt id) of a trajectory id."""
    return trajectory.rsplit("/", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How each token of a trajectory is drawn. Names and meaning are vLLM's."""

    max_tokens: int
    """Limit on response tokens, counted over the whole trajectory however often it moved."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One group to sample: topic ``prompts``, key ``prompt_id``."""

    prompt_id: str
    dataset: str
    """Fingerprint of the dataset: the same rows always give the same ids."""
    epoch: int
    """Pass over the data; for ``purpose="eval"`` the evaluation round."""
    index: int
    """Row in the dataset."""
    purpose: Purpose
    task: str
    group_size: int
    prompt_tokens: bytes
    """int32 little-endian, shape (P,)."""
    n_prompt_tokens: int
    prompt_text: str
    messages: str | None = None
    """The chat messages as JSON, when the row had messages."""
    template: Literal["chat", "raw"] = "raw"
    """Whether the tokenizer's chat template made the prompt."""
    reference: str | None = None
    """The reference answer for the reward."""
    sampling: Sampling
    seed: int
    """Base seed of the group; a member's seed is derived from it, the member and the tokens so far."""
    min_version: int = 0
    """The group may only be started by a rollout that holds this policy version or a newer one."""
    round_size: int = 0
    """For ``purpose="eval"``: how many prompts this evaluation round has; 0 for training."""
    created_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When a trajectory passed each stage, epoch milliseconds; 0 = not reached."""

    admitted_ms: int = 0
    """The prompt was produced."""
    started_ms: int = 0
    """A rollout took the group."""
    first_token_ms: int = 0
    ended_ms: int = 0
    moves: int = 0
    """How often it changed its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStarted:
    """A rollout owns this member from here on: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    """0 for the first owner; grows by one with each change of owner."""
    member: int
    prompt: Prompt
    """The whole prompt, so that the partial pool alone can resume the trajectory."""
    rollout_id: str
    incarnation: int
    """Of the rollout process: larger = younger."""
    version: int
    """Policy version the owner holds."""
    engine: str
    seed: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTokens:
    """New tokens of a running trajectory: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    start: int
    """How many response tokens came before these; a fold appends only where start equals what it has."""
    tokens: Tokens
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMoved:
    """The trajectory changes its owner: topic ``trajectories.partial``, key ``trajectory_id``."""

    trajectory_id: str
    attempt: int
    """Of the new owner: the old owner's attempt + 1."""
    reason: MoveReason
    from_rollout: str
    to_rollout: str
    to_incarnation: int
    n_tokens: int
    """Response tokens at the move; the new owner continues from exactly these."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnded:
    """The trajectory left the partial pool: topic ``trajectories.partial``, key ``trajectory_id``.

    Written in the transaction that writes its CompletedTrajectory (or its DeadLetter).
    """

    trajectory_id: str
    attempt: int
    finish: FinishReason | None
    """None: it ended in a dead letter; ``error`` says why."""
    error: str | None = None
    n_tokens: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedTrajectory:
    """A finished trajectory, self-contained: topic ``trajectories.completed``, key ``group_id``."""

    trajectory_id: str
    group_id: str
    member: int
    attempt: int
    prompt: Prompt
    response: Tokens
    text: str
    """The response decoded without special tokens."""
    finish: FinishReason
    rollout_id: str
    engine: str
    logprobs_mode: Literal["raw", "processed"] = "processed"
    """``processed``: logprobs are of the distribution after temperature and truncation; ``raw``: before."""
    seed: int
    version_min: int
    """Oldest policy version among the sampled tokens."""
    version_max: int
    timings: Timings
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A completed trajectory with its reward: topic ``trajectories.scored``, key ``group_id``."""

    trajectory: CompletedTrajectory
    reward: float | None
    """None: the verifier could not tell; ``failure`` says why. Never a made-up zero."""
    failure: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    function: str
    """The reward function, as configured."""
    latency_ms: float
    scored_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor inside a version's byte range."""

    name: str
    dtype: str
    """safetensors' names: ``F32``, ``BF16``, ``F16``, ..."""
    shape: tuple[int, ...]
    offset: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """A policy version: topic ``weights.versions``, key ``run_id``. Only ``committed`` versions are ever applied."""

    run_id: str
    epoch: int
    """The trainer's fencing epoch: a manifest of an older epoch is void once a newer one is seen."""
    version: int
    """Counts optimizer steps; after a crash it goes on above the highest number ever published."""
    parent: int
    """The version it was made from; -1 for the first."""
    step: int
    """Optimizer steps behind these weights."""
    state: VersionState
    tensors: tuple[TensorEntry, ...]
    total_bytes: int
    chunk_bytes: int
    chunk_digests: bytes
    """xxh3-64 of each chunk, 8 bytes little-endian each, in order."""
    root_digest: str
    """xxh3-128 over ``chunk_digests``, hex."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that are not in ``tensors`` because they share memory: alias -> name."""
    relay_id: str
    """The relay that the trainer copied it to."""
    relay_url: str
    relay_boot: str
    at_ms: int
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """One trajectory inside a rollout."""

    trajectory_id: str
    attempt: int
    n_tokens: int
    """Prompt and response tokens: what it needs of the KV cache now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """A rollout's heartbeat: topic ``rollouts.status``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    state: RolloutState
    version: int
    """Policy version held; -1 before the first load."""
    kv_used: int
    """Tokens in the KV cache."""
    kv_total: int
    """Tokens that fit into the KV cache."""
    running: int
    waiting: int
    preempted: int
    """Since start."""
    max_running: int
    """B, the engine's batch limit."""
    tokens_per_s: float
    in_flight: tuple[InFlight, ...]
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a rollout needs in order to go on with a trajectory."""

    trajectory_id: str
    attempt: int
    """Of the new owner."""
    member: int
    prompt: Prompt
    response: Tokens
    """What was sampled so far."""
    version: int
    """The policy version the trajectory is pinned to."""
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCommand:
    """Give these trajectories to another rollout: topic ``rollouts.commands``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    """The process it is meant for; another one ignores it."""
    trajectory_ids: tuple[str, ...]
    to_rollout: str
    to_incarnation: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptCommand:
    """Go on with this trajectory: topic ``rollouts.commands``, key ``rollout_id``."""

    rollout_id: str
    incarnation: int
    reason: MoveReason
    from_rollout: str
    snapshot: Snapshot
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Take no new work, finish or hand over what is running, then stop: topic ``rollouts.commands``."""

    rollout_id: str
    incarnation: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A policy version in a relay's memory."""

    version: int
    epoch: int
    chunks_verified: int
    n_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """A relay's heartbeat: topic ``relays.status``, key ``relay_id``."""

    relay_id: str
    boot_id: str
    """New with every start: bytes of another boot are never mixed."""
    url: str
    host: str
    """Machine identity: the same host means that the shared memory below can be mapped."""
    shm_dir: str
    zone: str = ""
    versions: tuple[HeldVersion, ...]
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """One finished member that is not trained on."""

    trajectory_id: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted:
    """A trainer process begins: topic ``training.steps``, key ``run_id``.

    It voids every TrainingStep of an older epoch whose step is above ``step``: the trainer resumed from a
    checkpoint below it, and what those steps consumed is consumed again.
    """

    run_id: str
    epoch: int
    step: int
    """The checkpoint's step; 0 for a new run."""
    version: int
    """Policy version under which the resumed weights are published."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One optimizer step: topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    """1 for the first."""
    version: int
    """The policy version this step made."""
    trained: tuple[str, ...]
    """Trajectory ids whose tokens entered the loss."""
    dropped: tuple[Dropped, ...]
    """Finished members that this step resolved without training on them."""
    staleness: Mapping[str, int]
    """Histogram over trained trajectories: (version before the step - version_min) -> count."""
    metrics: Mapping[str, float]
    offsets: Mapping[str, int]
    """``topic[partition]`` -> lowest offset that is not resolved yet."""
    n_tokens: int
    """Response tokens that entered the loss."""
    duration_ms: float
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation round: topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    round: int
    """0 = before training."""
    version: int
    """Oldest policy version among the answers."""
    reward_mean: float
    n: int
    """Scored answers."""
    resolved: tuple[Dropped, ...]
    """Every member of the round that came in, with reason ``eval`` (or ``unscored``)."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataExhausted:
    """No training group will follow: topic ``training.steps``, key ``run_id``. Written by ``prompts``."""

    run_id: str
    groups: int
    """Training groups admitted in all."""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The end event: every operator drains and exits 0. Topic ``training.steps``, key ``run_id``."""

    run_id: str
    epoch: int
    step: int
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One header of a dead letter's original record."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record or a trajectory that could not be processed: topic ``dead.letters``, key = the source's key."""

    operator: str
    kind: str
    """The error's class name."""
    error: str
    topic: str
    partition: int
    offset: int
    """Of the source record; -1 when the fault is not a record's."""
    attempt: int
    """How often it was tried."""
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    group_id: str | None = None
    trajectory_ids: tuple[str, ...] = ()
    """Members whose fate this letter settles."""
    at_ms: int


Record = (
    Prompt
    | TrajectoryStarted
    | TrajectoryTokens
    | TrajectoryMoved
    | TrajectoryEnded
    | CompletedTrajectory
    | ScoredTrajectory
    | VersionManifest
    | RolloutStatus
    | ReleaseCommand
    | AdoptCommand
    | DrainCommand
    | RelayStatus
    | TrainerStarted
    | TrainingStep
    | Evaluation
    | DataExhausted
    | RunEnded
    | DeadLetter
)
"""Every record that may stand on a topic by itself."""
