"""How much of one core the operator takes beside the engine while 64 requests decode.

The engine is scripted, so that its decode steps take their time on the clock and no CPU to speak of. In this process a
poll sleeps until the next step is due, and what is counted is the CPU time of the process (the log client's threads
too) without that spent inside the engine. In a process of its own it reports each step, and everything in the
operator's process is counted, the engine's proxy too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.rollout.operate import Watched, context_of, open_bench_log, put, rollout_of, turn
from benchmarks.rollout.workload import BATCH, GROUP
from laminar.operators.operator import Context
from laminar.operators.rollout.config import RolloutConfig, ScriptedEngineConfig
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.choice import build_engine
from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded
from laminar.schemas.records import Prompt, Sampling
from laminar.schemas.tokens import ids_buffer
from laminar.streams.deadline import Deadline

__all__ = ["Layout", "Share", "measure_share"]

Layout = Literal["shared", "own"]

_LONGEST = 4000
_START_S = 60.0


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


def measure_share(
    layout: Layout, kind: str, bootstrap: str, *, steps_per_s: float, seconds: float, n_tokens: int | None = None
) -> Share:
    """For so many seconds, after all requests have begun. ``n_tokens``: of the longest response; None: none ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-share-")))
        log = open_bench_log(kind, folder, bootstrap)
        stack.callback(log.close)
        context = context_of(log, kind, folder)
        engine, inside_s = _engine(layout, context, steps_per_s, n_tokens)
        stack.callback(engine.close)
        engine.load({}, 0)
        watched = Watched(engine)
        n_groups = BATCH // GROUP
        if n_tokens is not None:
            n_groups += 2 + int(3 * (seconds + 3) * steps_per_s / n_tokens) * n_groups
        put(log, [_prompt(i) for i in range(n_groups)])
        rollout = rollout_of(watched, context, RolloutConfig())
        deadline, idle_s = Deadline.after(_START_S, "all requests decode"), 0.001
        while engine.stats().running < BATCH:
            deadline.check(f"{engine.stats().running} of {BATCH}")
            idle_s = turn(rollout, idle_s)
        settled = time.perf_counter() + 1.0  # the first second has its own costs
        while time.perf_counter() < settled:
            idle_s = turn(rollout, idle_s)
        began, cpu_s, before_s, tokens = time.perf_counter(), time.process_time(), inside_s(), watched.n_tokens
        while time.perf_counter() - began < seconds:
            idle_s = turn(rollout, idle_s)
        wall_s = time.perf_counter() - began
        outside_s = time.process_time() - cpu_s - (inside_s() - before_s)
        share = Share(outside=outside_s / wall_s, tokens_per_s=(watched.n_tokens - tokens) / wall_s)
        rollout.close()
    return share


def _engine(
    layout: Layout, context: Context, steps_per_s: float, n_tokens: int | None
) -> tuple[Any, Callable[[], float]]:
    """It, and the CPU seconds of this process that it has taken so far."""
    shortest, longest = (_LONGEST, _LONGEST) if n_tokens is None else (max(1, n_tokens // 4), n_tokens)
    limits = {"max_running": BATCH, "max_model_len": 2 * _LONGEST, "kv_total": BATCH * 2 * _LONGEST}
    if layout == "shared":
        paced = _Paced(ScriptedEngine(seeded(min_tokens=shortest, max_tokens=longest), **limits), steps_per_s)
        return paced, lambda: paced.cpu_s
    config = ScriptedEngineConfig(
        process="own", min_tokens=shortest, max_tokens=longest, tokens_per_s=steps_per_s, **limits
    )
    return build_engine(config, context), lambda: 0.0


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
        sampling=Sampling(max_tokens=_LONGEST),
        seed=index,
        created_ms=0,
    )
