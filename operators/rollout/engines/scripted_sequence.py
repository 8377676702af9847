"""One request in a scripted engine: how far it is, and what it has to say."""

from __future__ import annotations

import numpy as np

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.script import Answer
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import Tokens

__all__ = ["Sequence"]


class Sequence:
    """See the module's docstring."""

    __slots__ = ("answer", "end", "failing", "finish", "held", "polled", "request", "sampled")

    def __init__(self, request: EngineRequest, answer: Answer, *, failing: bool, longest: int) -> None:
        n_prompt = len(request.prompt_ids)
        length, finish = _length(request, answer, longest - n_prompt)
        self.request = request
        self.answer = answer
        self.failing = failing
        self.end = max(length, request.sampled.n_tokens)
        """Response tokens at which it finishes."""
        self.finish: FinishReason = finish
        self.sampled = request.sampled.n_tokens
        """Response tokens so far."""
        self.polled = self.sampled
        self.held: list[Tokens] = []
        """Sampled and not yet polled."""

    @property
    def stop_at(self) -> int:
        """The next token position at which something other than a token happens."""
        stop = self.end
        if self.failing:
            stop = min(stop, self.answer.fail_at)
        for at in (self.answer.hang_at, self.answer.crash_at, self.answer.lose_at, self.answer.exit_at):
            if at is not None:
                stop = min(stop, at)
        return max(stop, self.sampled)

    @property
    def hangs(self) -> bool:
        return self.answer.hang_at is not None and self.sampled >= self.answer.hang_at

    @property
    def failed(self) -> bool:
        return self.failing and self.sampled >= self.answer.fail_at

    @property
    def ended(self) -> bool:
        return not self.hangs and (self.failed or self.sampled >= self.end)

    @property
    def kv(self) -> int:
        """Tokens in the KV cache."""
        return len(self.request.prompt_ids) + self.sampled

    def grow(self, n: int, version: int, *, version_ids: bool) -> None:
        if n <= 0:
            return
        part = slice(self.sampled, self.sampled + n)
        ids = np.full(n, version) if version_ids else self.answer.ids[part]
        logprobs = self.answer.logprobs
        values = np.full(n, logprobs) if isinstance(logprobs, (int, float)) else np.asarray(logprobs[part])
        self.held.append(
            Tokens(
                n_tokens=n,
                ids=np.asarray(ids, dtype="<i4").tobytes(),
                logprobs=values.astype("<f4").tobytes(),
                versions=np.full(n, version, dtype="<i4").tobytes(),
                mask=b"\x01" * n,
            )
        )
        self.sampled += n

    def take(self) -> Delta | None:
        """What was not polled yet; None when there is nothing to say."""
        error = f"scripted failure at token {self.sampled}" if self.ended and self.failed else None
        finish = self.finish if self.ended and error is None else None
        if not self.held and finish is None and error is None:
            return None
        tokens = self.held[0] if len(self.held) == 1 else Tokens.concat(self.held)
        self.held = []
        return Delta(trajectory_id=self.request.trajectory_id, tokens=tokens, finish=finish, error=error)


def _length(request: EngineRequest, answer: Answer, room: int) -> tuple[int, FinishReason]:
    """Response tokens in all, and why there are no more."""
    stops = set(request.sampling.stop_token_ids)
    n = next((i + 1 for i, token in enumerate(answer.ids) if token in stops), len(answer.ids))
    most = min(request.sampling.max_tokens, room)
    return (n, "stop") if n <= most else (most, "length")
