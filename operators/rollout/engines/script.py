"""What a scripted engine is told: the whole answer to each request, and what goes wrong on the way.

>>> answer = by_trajectory({"d/0/7/1": Answer(ids=(7, 8), lose_at=1)}, otherwise=Answer(ids=(7, 8, 9)))
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from laminar.operators.rollout.engine import EngineRequest

__all__ = ["EXITED", "Answer", "Script", "always", "by_trajectory", "seeded"]

EXITED = 134
"""Exit code of a scripted end of the process: what a shell shows after an abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The whole response to one request, from its first token, and what goes wrong on the way.

    Token counts below are positions in the whole response, resumed tokens included.
    """

    ids: tuple[int, ...]
    """Every response token; the last one stands for the end token. ``sampling.max_tokens``, a stop token or the model's
    limit may cut it short."""
    logprobs: float | tuple[float, ...] = -0.5
    """One for all tokens, or one for each. Not checked: NaN and positive values are faults to test with."""
    fail_times: int = 0
    """The first so many submissions of this trajectory to this engine fail with an error."""
    fail_at: int = 0
    """At which token those submissions fail."""
    reject: str | None = None
    """``submit`` raises InvalidRequest with this reason."""
    hang_at: int | None = None
    """At this token it stops and stays in the batch for ever."""
    crash_at: int | None = None
    """At this token the whole engine dies: this poll and every later call raise Unavailable."""
    lose_at: int | None = None
    """At this token the engine is lost (see ScriptedEngine.lose), each time that it gets there."""
    exit_at: int | None = None
    """At this token the whole process ends (``os._exit``), as by a fault inside a GPU library: no word, no cleaning."""


Script = Callable[[EngineRequest], Answer]
"""Says how a request is answered. Called once for each submission; the answer must not depend on ``sampled``."""


def always(answer: Answer) -> Script:
    """The same answer for every request."""
    return lambda request: answer  # noqa: ARG005


def by_trajectory(answers: Mapping[str, Answer], otherwise: Answer) -> Script:
    """An answer per trajectory id, and one for all the others."""
    return lambda request: answers.get(request.trajectory_id, otherwise)


def seeded(*, min_tokens: int = 4, max_tokens: int = 32, vocab_size: int = 256, deadly: Collection[str] = ()) -> Script:
    """Tokens and a length (log-uniform) drawn from the request's prompt and seed: the same request, the same answer.

    ``deadly``: trajectories, as ``EPOCH/INDEX/MEMBER``, that end the process with their first token.
    """
    ends = tuple(f"/{one}" for one in deadly)

    def script(request: EngineRequest) -> Answer:
        digest = hashlib.blake2b(f"{request.seed}:{request.prompt_ids}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "little"))
        low, high = math.log(min_tokens), math.log(max_tokens + 1)
        n = min(max_tokens, max(min_tokens, int(math.exp(rng.uniform(low, high)))))
        logprobs = -rng.exponential(0.5, n)
        return Answer(
            ids=tuple(rng.integers(0, vocab_size, n).tolist()),
            logprobs=tuple(logprobs.tolist()),
            exit_at=1 if request.trajectory_id.endswith(ends) else None,
        )

    return script
