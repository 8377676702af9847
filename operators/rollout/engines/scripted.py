"""An engine that does as it is told: a script dictates each trajectory's tokens, logprobs, length and faults.

For tests (yours too) and for the simulator: no model, no thread, no sleep, no randomness that was not asked for.
The rest is like a real engine: a batch limit, a KV cache that fills up and preempts, versions per token, abort, resume.

Guarantees, beside those of ``laminar.operators.rollout.engine``: the same calls in the same order at the same clock
readings give the same deltas; a script's answer is the whole response, so a resumed request goes on exactly where the
partial ends; nothing is sampled before the first ``load``.

Time is one of two things. With ``tokens_per_poll`` each poll is that many decode steps. With ``tokens_per_s`` and a
``clock`` the decode steps follow the clock, also between polls: ``abort`` then returns what came since the last one.

>>> from laminar.schemas.records import Sampling
>>> engine = ScriptedEngine(always(Answer(ids=(7, 8, 9))), tokens_per_poll=2)
>>> engine.load({}, version=4)
>>> engine.submit(EngineRequest(trajectory_id="p/0/0/0", prompt_ids=(1,), sampling=Sampling(max_tokens=8), seed=0))
>>> [(d.tokens.ids_T.tolist(), d.finish) for _ in range(2) for d in engine.poll(0.0)]
[([7, 8], None), ([9], 'stop')]
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from laminar.operators.rollout.engine import Delta, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.engines.in_process import InProcess
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, InvalidRequest, Unavailable, WeightsMismatch
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["EXITED", "Answer", "Script", "ScriptedEngine", "always", "by_trajectory", "seeded"]

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


class _Sequence:
    """One request in the engine."""

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
        for at in (self.answer.hang_at, self.answer.crash_at, self.answer.exit_at):
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


class ScriptedEngine(InProcess):
    """See the module's docstring.

    ``version_ids``: each sampled token's id is the policy version that sampled it, whatever the answer says (C4).
    ``refuse_versions``: ``load`` of these raises WeightsMismatch.
    """

    name = "scripted-1"

    def __init__(
        self,
        script: Script,
        *,
        max_running: int = 64,
        max_model_len: int = 4096,
        kv_total: int = 65536,
        tokens_per_poll: int = 1,
        tokens_per_s: float | None = None,
        clock: Callable[[], float] | None = None,
        version_ids: bool = False,
        refuse_versions: frozenset[int] = frozenset(),
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        if (tokens_per_s is None) != (clock is None):
            raise ConfigError("ScriptedEngine: tokens_per_s and clock go together")
        if tokens_per_poll < 1 or (tokens_per_s is not None and tokens_per_s <= 0):
            raise ConfigError("ScriptedEngine: tokens_per_poll is at least 1, tokens_per_s above 0")
        self._script = script
        self._limits = EngineLimits(max_running=max_running, max_model_len=max_model_len, kv_total=kv_total)
        self._tokens_per_poll = tokens_per_poll
        self._tokens_per_s = tokens_per_s
        self._clock = clock
        self._since = clock() if clock is not None else 0.0
        self._steps_done = 0
        self._version_ids = version_ids
        self._refused = refuse_versions
        self._decode = decode
        self._version = -1
        self._running: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._tries: dict[str, int] = {}
        self._preempted = 0
        self._crashed: str | None = None
        self.submitted: list[EngineRequest] = []
        """Every accepted request, in order: what a test asserts on."""
        self.loads: list[int] = []
        """Every version loaded, in order."""

    @property
    def version(self) -> int:
        """Policy version loaded; -1 before the first load."""
        return self._version

    @property
    def limits(self) -> EngineLimits:
        """Fixed after start."""
        return self._limits

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, or Unavailable after a crash."""
        self._check_alive()
        known = request.trajectory_id
        if known in self._running or any(s.request.trajectory_id == known for s in self._waiting):
            raise InvalidRequest(f"{known}: already in the engine")
        answer = self._script(request)
        if answer.reject is not None:
            raise InvalidRequest(f"{known}: {answer.reject}")
        longest = min(self._limits.max_model_len, self._limits.kv_total)
        if len(request.prompt_ids) + 1 > longest:
            raise InvalidRequest(
                f"{known}: {len(request.prompt_ids)} prompt tokens leave no room for a response "
                f"(max_model_len {self._limits.max_model_len}, kv_total {self._limits.kv_total})"
            )
        self._advance()
        tries = self._tries[known] = self._tries.get(known, 0) + 1
        failing = tries <= answer.fail_times
        self._waiting.append(_Sequence(request, answer, failing=failing, longest=longest))
        self.submitted.append(request)

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""
        self._check_alive()
        self._advance()
        sequence = self._running.pop(trajectory_id, None)
        if sequence is None:
            sequence = next((s for s in self._waiting if s.request.trajectory_id == trajectory_id), None)
            if sequence is None:
                return None
            self._waiting.remove(sequence)
            if not sequence.held:
                return Delta(trajectory_id=trajectory_id, tokens=EMPTY)
        return sequence.take() or Delta(trajectory_id=trajectory_id, tokens=EMPTY)

    def poll(self, timeout_s: float) -> list[Delta]:  # noqa: ARG002
        """Decode what is due and return the new tokens; never waits. Raises Unavailable at a scripted crash."""
        self._check_alive()
        self._advance(self._tokens_per_poll if self._clock is None else 0)
        preempted = [s for s in self._waiting if s.held]
        deltas = [d for s in [*self._running.values(), *preempted] if (d := s.take()) is not None]
        for delta in deltas:
            if delta.finish is not None or delta.error is not None:
                self._running.pop(delta.trajectory_id, None)
        return deltas

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:  # noqa: ARG002
        """Sample with this version from here on. Raises WeightsMismatch for a version in ``refuse_versions``."""
        self._check_alive()
        if version in self._refused:
            raise WeightsMismatch(f"version {version}: refused by the script")
        self._advance()
        self._version = version
        self.loads.append(version)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=sum(s.kv for s in self._running.values()),
            kv_total=self._limits.kv_total,
            preempted=self._preempted,
        )

    def decode(self, ids: tuple[int, ...]) -> str:
        """The injected decoder's text, or the ids in decimal with spaces between."""
        return self._decode(ids) if self._decode is not None else " ".join(map(str, ids))

    def close(self) -> None:
        """Forget everything."""
        self._running.clear()
        self._waiting.clear()

    def _check_alive(self) -> None:
        if self._crashed is not None:
            raise Unavailable(self._crashed)

    def _advance(self, steps: int = 0) -> None:
        """Decode ``steps``, or what the clock says is due: all running sequences gain a token each step."""
        if self._clock is not None and self._tokens_per_s is not None:
            due = math.floor((self._clock() - self._since) * self._tokens_per_s + 1e-6)
            steps, self._steps_done = due - self._steps_done, due
        if self._version < 0:
            return
        while True:
            self._admit()
            growing = [s for s in self._running.values() if s.sampled < s.stop_at]
            self._crash_if_due()
            if steps <= 0 or not growing:
                return
            # All of them grow in one jump, up to the next step at which one of them stops or the cache is full.
            free = self._limits.kv_total - sum(s.kv for s in self._running.values())
            jump = min(steps, min(s.stop_at - s.sampled for s in growing), free // len(growing))
            if jump == 0:
                self._preempt()
                continue
            for sequence in growing:
                sequence.grow(jump, self._version, version_ids=self._version_ids)
            steps -= jump

    def _admit(self) -> None:
        busy = [s for s in self._running.values() if not s.ended]
        kv = sum(s.kv for s in self._running.values())
        n = len(busy)
        while self._waiting and n < self._limits.max_running:
            head = self._waiting[0]
            # Each of them must be able to take the next step, or the newcomer would be preempted at once.
            if self._running and kv + head.kv + n + 1 > self._limits.kv_total:
                return
            self._waiting.popleft()
            self._running[head.request.trajectory_id] = head
            kv += head.kv
            n += 1

    def _preempt(self) -> None:
        """The youngest running sequence gives up its cache and waits at the front; its tokens stay."""
        youngest = next(reversed([s for s in self._running.values() if not s.ended]))
        del self._running[youngest.request.trajectory_id]
        self._waiting.appendleft(youngest)
        self._preempted += 1

    def _crash_if_due(self) -> None:
        for sequence in self._running.values():
            ends_at = sequence.answer.exit_at
            if ends_at is not None and sequence.sampled >= ends_at:
                os._exit(EXITED)
            at = sequence.answer.crash_at
            if at is not None and sequence.sampled >= at:
                self._crashed = f"the engine crashed at token {at} of {sequence.request.trajectory_id}, as scripted"
                raise Unavailable(self._crashed)
