"""Every record that travels on the log, as frozen dataclasses.

One class a record, one ``.avsc`` a record and version in ``schemas/avro/``;
the classes stand in the modules of their nouns and are all found here. Times are Unix epoch milliseconds
(``_ms``); durations carry their unit. Ids are deterministic (design section 2)::

    prompt_id     = {dataset fingerprint}/{epoch}/{index}        also the group id
    trajectory_id = {prompt_id}/{member}                          member in 0 .. group_size - 1

>>> trajectory_id("9f3a/0/17", 3)
'9f3a/0/17/3'
"""

from __future__ import annotations

from laminar.schemas.dead_letter import DeadLetter, DeadLetterSettled, Header, OffsetsSkipped, SettleAction
from laminar.schemas.prompt import Prompt, Purpose, Sampling, group_id_of, trajectory_id
from laminar.schemas.rollout import AdoptCommand, DrainCommand, InFlight, ReleaseCommand, RolloutState, RolloutStatus
from laminar.schemas.training import (
    DataExhausted,
    Dropped,
    DropReason,
    Evaluation,
    RunEnded,
    TrainerStarted,
    TrainingStep,
)
from laminar.schemas.trajectory import (
    CompletedTrajectory,
    FinishReason,
    MoveReason,
    ScoredTrajectory,
    Snapshot,
    Timings,
    TrajectoryEnded,
    TrajectoryMoved,
    TrajectoryStarted,
    TrajectoryTokens,
    UpdateMode,
)
from laminar.schemas.weight import HeldVersion, Probe, RelayStatus, TensorEntry, VersionManifest, VersionState

__all__ = [
    "AdoptCommand",
    "CompletedTrajectory",
    "DataExhausted",
    "DeadLetter",
    "DeadLetterSettled",
    "DrainCommand",
    "DropReason",
    "Dropped",
    "Evaluation",
    "FinishReason",
    "Header",
    "HeldVersion",
    "InFlight",
    "MoveReason",
    "OffsetsSkipped",
    "Probe",
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
    "SettleAction",
    "Snapshot",
    "TensorEntry",
    "Timings",
    "TrainerStarted",
    "TrainingStep",
    "TrajectoryEnded",
    "TrajectoryMoved",
    "TrajectoryStarted",
    "TrajectoryTokens",
    "UpdateMode",
    "VersionManifest",
    "VersionState",
    "group_id_of",
    "trajectory_id",
]

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
    | DeadLetterSettled
    | OffsetsSkipped
)
"""Every record that may stand on a topic by itself."""
