"""What the topics say in the end: the ledger, and every finished trajectory token for token."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.ledger import member_seed
from laminar.pipeline.auditing import audit_run
from laminar.pipeline.config.models import RunConfig
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import ids_view
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.log import Log
from laminar.streams.open import open_log
from laminar.streams.reading import decoded, read_topic
from tests.chaos.soak.deployment import SCRIPT

__all__ = ["Evidence", "gather", "wrong_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was read."""

    ledger: Ledger
    completed: int
    tokens: int
    moved: Counter[str]
    """Changes of owner, by reason."""
    resumed: int
    """Finished trajectories that had more than one owner."""
    wrong: tuple[str, ...]
    """Finished trajectories that are not what the script dictates."""

    @property
    def lost(self) -> int:
        """Members without a fate."""
        return sum(violation.kind in ("lost", "no_result") for violation in self.ledger.violations)

    @property
    def twice(self) -> int:
        """Members with two fates."""
        return sum(violation.kind.endswith("_twice") for violation in self.ledger.violations)


def gather(config: RunConfig, timeout_s: float = 600.0) -> Evidence:
    """Read everything. Raises Retryable when the log does not answer."""
    deadline, codec = Deadline.after(timeout_s, "read what the topics say"), Codec()
    with closing(open_log(config.log, run_id=config.name)) as log:
        ledger = audit_run(log, codec, config, deadline)
        completed = tokens = resumed = 0
        wrong: list[str] = []
        for _, record in decoded(read_topic(log, "trajectories.completed", deadline), codec):
            if isinstance(record, r.CompletedTrajectory):
                completed += 1
                tokens += record.response.n_tokens
                resumed += record.attempt > 0
                wrong += wrong_tokens(record)
        return Evidence(
            ledger=ledger,
            completed=completed,
            tokens=tokens,
            moved=_moves(log, codec, deadline),
            resumed=resumed,
            wrong=tuple(wrong),
        )


def wrong_tokens(done: r.CompletedTrajectory) -> list[str]:
    """How a finished trajectory differs from the script's answer; [] when it does not."""
    if done.seed != member_seed(done.prompt.seed, done.member):
        return [f"{done.trajectory_id}: seed {done.seed} is not the member's"]
    request = EngineRequest(
        trajectory_id=done.trajectory_id,
        prompt_ids=tuple(ids_view(done.prompt.prompt_tokens).tolist()),
        sampling=done.prompt.sampling,
        seed=done.seed,
    )
    answer = SCRIPT(request)
    if tuple(done.response.ids_T.tolist()) != answer.ids:
        return [f"{done.trajectory_id}: its {done.response.n_tokens} tokens are not the script's {len(answer.ids)}"]
    if not np.array_equal(done.response.logprobs_T, np.asarray(answer.logprobs, dtype="<f4")):
        return [f"{done.trajectory_id}: its logprobs are not the script's"]
    return []


def _moves(log: Log, codec: Codec, deadline: Deadline) -> Counter[str]:
    found: Counter[str] = Counter()
    for record in read_topic(log, "trajectories.partial", deadline):
        schema = codec.schema_of(record.value or b"")
        if schema is not None and schema.name == r.TrajectoryMoved.__name__:
            moved: Any = codec.decode(record.value or b"")
            found[moved.reason] += 1
    return found
