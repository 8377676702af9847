"""An engine that does as it is told: a script dictates each trajectory's tokens, logprobs, length and faults.

For tests (yours too) and for the simulator: no model, no thread, no sleep, no randomness that was not asked for.
The rest is like a real engine: a batch limit, a KV cache that fills up and preempts, versions per token, abort, resume.

Guarantees, beside those of ``laminar.operators.rollout.engine``: the same calls in the same order at the same clock
readings give the same deltas; a script's answer is the whole response, so a resumed request goes on exactly where the
partial ends; nothing is sampled before the first ``load``.

With ``away`` it can be lost like an engine in a process of its own: ``lose``, ``Answer.lose_at``, ``restart``.

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

import math
import os
from collections import deque
from collections.abc import Callable, Mapping

from laminar.operators.rollout.engine import Delta, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.engines.in_process import InProcess
from laminar.operators.rollout.engines.script import EXITED, Answer, Script, always, by_trajectory, seeded
from laminar.operators.rollout.engines.scripted_absence import Absence, Call
from laminar.operators.rollout.engines.scripted_sequence import Sequence
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, EngineLost, InvalidRequest, Unavailable, WeightsMismatch
from laminar.schemas.tokens import EMPTY

__all__ = ["EXITED", "Answer", "Script", "ScriptedEngine", "always", "by_trajectory", "seeded"]


class ScriptedEngine(InProcess):
    """See the module's docstring.

    ``version_ids``: each sampled token's id is the policy version that sampled it, whatever the answer says (C4).
    ``refuse_versions``: ``load`` of these raises WeightsMismatch.
    ``away``: how long it is away after it was lost, in seconds of its clock or in polls where it has none; None: it
    lives in its caller's process, and cannot be lost.
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
        away: float | None = None,
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
        self._absence = Absence(away=away, clock=clock)
        self._version = -1
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._tries: dict[str, int] = {}
        self._preempted = 0
        self._crashed: str | None = None
        self.submitted: list[EngineRequest] = []
        """Every accepted request, in order: what a test asserts on."""
        self.loads: list[int] = []
        """Every version loaded, in order."""
        self.losses = 0
        """How often it was lost."""

    @property
    def version(self) -> int:
        """Policy version loaded; -1 before the first load."""
        return self._version

    @property
    def limits(self) -> EngineLimits:
        """Fixed after start."""
        return self._limits

    @property
    def ready(self) -> bool:
        """See Engine.ready."""
        return self._absence.present

    def lose(self, *, at: Call = "any", skip: int = 0, away: float | None = None) -> None:
        """It is lost at the next call (of this kind, after ``skip`` of them), which raises EngineLost."""
        self._absence.expect(at, skip=skip, away=away)

    def restart(self, why: str) -> None:
        """See Engine.restart."""
        if not self._absence.possible:
            super().restart(why)
        raise self._lost(f"was given up: {why}")

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, EngineLost, or Unavailable after a crash."""
        self._enter("submit")
        self._check_there()
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
        self._waiting.append(Sequence(request, answer, failing=failing, longest=longest))
        self.submitted.append(request)

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""
        self._enter("abort")
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
        self._enter("poll")
        if not self._absence.look():
            return []
        self._advance(self._tokens_per_poll if self._clock is None else 0)
        preempted = [s for s in self._waiting if s.held]
        deltas = [d for s in [*self._running.values(), *preempted] if (d := s.take()) is not None]
        for delta in deltas:
            if delta.finish is not None or delta.error is not None:
                self._running.pop(delta.trajectory_id, None)
        return deltas

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:  # noqa: ARG002
        """Sample with this version from here on. Raises WeightsMismatch for a version in ``refuse_versions``."""
        self._enter("load")
        self._check_there()
        if version in self._refused:
            raise WeightsMismatch(f"version {version}: refused by the script")
        self._advance()
        self._version = version
        self.loads.append(version)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        self._enter("stats")
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=sum(s.kv for s in self._running.values()),
            kv_total=self._limits.kv_total,
            preempted=self._preempted,
        )

    def decode(self, ids: tuple[int, ...]) -> str:
        """The injected decoder's text, or the ids in decimal with spaces between."""
        self._enter("decode")
        return self._decode(ids) if self._decode is not None else " ".join(map(str, ids))

    def close(self) -> None:
        """Forget everything."""
        self._running.clear()
        self._waiting.clear()

    def _enter(self, call: Call) -> None:
        if self._crashed is not None and call not in ("stats", "decode"):
            raise Unavailable(self._crashed)
        why = self._absence.due(call)
        if why is not None:
            raise self._lost(why)

    def _check_there(self) -> None:
        if not self._absence.present:
            raise Unavailable(f"engine {self.name}: has not started anew yet")

    def _lost(self, why: str) -> EngineLost:
        """The error to raise: everything in it is gone."""
        self.close()
        self._version = -1
        self._preempted = 0
        self.losses += 1
        self._absence.begin()
        return EngineLost(f"engine {self.name} {why}")

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
            lost_at = sequence.answer.lose_at
            if lost_at is not None and sequence.sampled >= lost_at:
                raise self._lost(f"was lost at token {lost_at} of {sequence.request.trajectory_id}, as scripted")
            at = sequence.answer.crash_at
            if at is not None and sequence.sampled >= at:
                self._crashed = f"the engine crashed at token {at} of {sequence.request.trajectory_id}, as scripted"
                raise Unavailable(self._crashed)
