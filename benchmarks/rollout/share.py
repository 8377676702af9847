"""How much of one core the operator takes beside the engine while 64 requests decode.

The engine is scripted: each poll sleeps until its next decode step is due, and every request gains a token then. What
is counted is the CPU time of the process (the log client's threads too) without that spent inside the engine.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rollout.operate import Watched, context_of, open_bench_log, put, rollout_of, turn
from benchmarks.rollout.workload import BATCH, GROUP
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always
from laminar.schemas.records import Prompt, Sampling
from laminar.schemas.tokens import ids_buffer
from laminar.streams.deadline import Deadline

__all__ = ["Share", "measure_share"]

_LONG = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of one core."""

    outside: float
    """Everything but the engine."""
    tokens_per_s: float
    """Of all requests together."""


class _Paced:
    """Polls take as long as decode steps would, and their CPU time is known."""

    def __init__(self, engine: ScriptedEngine, steps_per_s: float) -> None:
        self._engine = engine
        self._step_s = 1 / steps_per_s
        self._next = time.perf_counter()
        self.cpu_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def poll(self, timeout_s: float) -> list[Delta]:
        began = time.thread_time()
        now = time.perf_counter()
        self._next = max(self._next + self._step_s, now)
        time.sleep(self._next - now)
        deltas = self._engine.poll(timeout_s)
        self.cpu_s += time.thread_time() - began
        return deltas


def measure_share(kind: str, bootstrap: str, *, steps_per_s: float, n_tokens: int, seconds: float) -> Share:
    """``n_tokens`` of each response; 0: none ends. For so many seconds, after all of them have begun."""
    scripted = ScriptedEngine(
        always(Answer(ids=tuple(range(n_tokens or _LONG)))),
        max_running=BATCH,
        max_model_len=2 * _LONG,
        kv_total=BATCH * 2 * _LONG,
    )
    scripted.load({}, 0)
    paced: Any = _Paced(scripted, steps_per_s)
    watched = Watched(paced)
    n_groups = BATCH // GROUP
    if n_tokens:
        n_groups *= 2 + int((seconds + 5) * steps_per_s / n_tokens)
    with tempfile.TemporaryDirectory(prefix="laminar-share-") as name:
        log = open_bench_log(kind, Path(name), bootstrap)
        put(log, [_prompt(i) for i in range(n_groups)])
        rollout = rollout_of(watched, context_of(log, kind, Path(name)), RolloutConfig())
        deadline, idle_s = Deadline.after(60.0, "all requests decode"), 0.001
        while scripted.stats().running < BATCH:
            deadline.check()
            idle_s = turn(rollout, idle_s)
        for _ in range(int(steps_per_s)):  # the first second has its own costs
            idle_s = turn(rollout, idle_s)
        began, cpu_s, inside_s, tokens = time.perf_counter(), time.process_time(), paced.cpu_s, watched.n_tokens
        while time.perf_counter() - began < seconds:
            idle_s = turn(rollout, idle_s)
        wall_s = time.perf_counter() - began
        outside_s = time.process_time() - cpu_s - (paced.cpu_s - inside_s)
        share = Share(outside=outside_s / wall_s, tokens_per_s=(watched.n_tokens - tokens) / wall_s)
        rollout.close()
        log.close()
    return share


def _prompt(index: int) -> Prompt:
    return Prompt(
        prompt_id=f"bench/0/{index}",
        dataset="bench",
        epoch=0,
        index=index,
        purpose="train",
        task="bench",
        group_size=GROUP,
        prompt_tokens=ids_buffer(range(24)),
        n_prompt_tokens=24,
        prompt_text="",
        sampling=Sampling(max_tokens=_LONG),
        seed=index,
        created_ms=0,
    )
