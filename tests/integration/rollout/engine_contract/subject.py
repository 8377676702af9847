"""What the engine contract suite knows about an engine under test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from laminar.operators.rollout.engine import Delta, Engine, EngineRequest
from laminar.operators.weights import TensorView
from laminar.schemas.records import FinishReason, Sampling
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Drive", "MakeSubject", "Subject", "request", "response_of"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One engine, before its first load."""

    engine: Engine
    prompts: tuple[tuple[int, ...], ...]
    """Some prompts of different lengths, 3 to 8 tokens, without a stop token inside."""
    weights: Callable[[int], Mapping[str, TensorView]]
    """Weights of a policy version."""
    wrong_weights: Mapping[str, TensorView]
    wrong_version: int = 99
    """``load(wrong_weights, wrong_version)`` must be refused."""
    release: Callable[[], None] | None = None
    """What to do with the engine after a test instead of closing it."""

    def done(self) -> None:
        """The test is over."""
        (self.release or self.engine.close)()


class MakeSubject(Protocol):
    """Makes an engine with these limits. It must be able to sample 24 tokens and more for each of its prompts."""

    def __call__(self, *, max_running: int = 4, max_model_len: int = 64, kv_total: int = 256) -> Subject: ...


class Drive:
    """Polls an engine and keeps what it said, with the rules that hold for every delta."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parts: dict[str, list[Tokens]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.most_running = 0
        self.most_kv = 0

    def poll(self) -> list[Delta]:
        """One poll."""
        deltas = self.engine.poll(0.01)
        for delta in deltas:
            self.take(delta)
        stats = self.engine.stats()
        self.most_running = max(self.most_running, stats.running)
        self.most_kv = max(self.most_kv, stats.kv_used)
        return deltas

    def take(self, delta: Delta) -> None:
        """Keep a delta."""
        assert delta.error is None, delta.error
        assert delta.trajectory_id not in self.finish, "a delta after the finish"
        delta.tokens.check(delta.trajectory_id)
        self.parts[delta.trajectory_id].append(delta.tokens)
        if delta.finish is not None:
            self.finish[delta.trajectory_id] = delta.finish

    def tokens(self, trajectory_id: str) -> Tokens:
        """All new tokens of a trajectory so far."""
        return Tokens.concat(self.parts[trajectory_id])

    def until_finished(self, ids: Iterable[str]) -> None:
        """Poll until all of these are finished."""
        waiting = set(ids)
        for _ in range(5000):
            if waiting <= self.finish.keys():
                return
            self.poll()
        raise AssertionError(f"not finished after 5000 polls: {sorted(waiting - self.finish.keys())}")

    def until_tokens(self, trajectory_id: str, n: int) -> None:
        """Poll until at least ``n`` new tokens of it came, or it finished."""
        for _ in range(5000):
            if self.tokens(trajectory_id).n_tokens >= n or trajectory_id in self.finish:
                return
            self.poll()
        raise AssertionError(f"{trajectory_id}: fewer than {n} tokens after 5000 polls")


def request(
    name: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 24,
    temperature: float = 0.0,
    sampled: Tokens = EMPTY,
    seed: int = 7,
    stop_token_ids: tuple[int, ...] = (),
) -> EngineRequest:
    """A request; greedy unless a temperature is given."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids)
    return EngineRequest(trajectory_id=name, prompt_ids=prompt, sampled=sampled, sampling=sampling, seed=seed)


def response_of(engine: Engine, what: EngineRequest) -> tuple[Tokens, FinishReason]:
    """Sample one request alone, to its end."""
    engine.submit(what)
    drive = Drive(engine)
    drive.until_finished([what.trajectory_id])
    return drive.tokens(what.trajectory_id), drive.finish[what.trajectory_id]
