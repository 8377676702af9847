"""The rollout operator around vLLM beside bare vLLM: tokens per second, same requests, same process layout, same run.

``python -m benchmarks.vllm_rollout [--quick] [--sizes tiny,20M,135M] [--layouts shared,own]``

Both sides decode up to 64 sequences together on one thread, at temperature 1 with a seed and the logprob of every
token; each request ends after its own number of tokens. Bare vLLM is its ``LLMEngine`` in a loop, with text, deltas and
statistics switched off: in this process, or with its core in a process of its own. The operator takes the prompts from
a log (SQLite, and a real Kafka broker) and writes every token, result and heartbeat to it. Rounds alternate, and the
best of each side counts. A model of 78,400 parameters makes everything around it large.

The first table: how much of one core the operator takes beside the engine while 64 requests decode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from benchmarks.claim import Claim, report
from benchmarks.rollout.share import Layout, measure_share
from laminar.streams.broker import Broker

__all__ = ["main"]

_LAYOUTS = ("shared", "own")
_LOGS = ("sqlite", "kafka")
_RATES = ((20.0, None), (50.0, None), (50.0, 400))
"""Decode steps a second, and tokens of the longest response."""


@dataclass(slots=True)
class _Rounds:
    """The seconds of each round of one side."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure, print the tables and the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="measure less: the tiny model, two rounds")
    parser.add_argument("--sizes", help="of the models, with commas between")
    parser.add_argument("--layouts", default=",".join(_LAYOUTS))
    parser.add_argument("--one", nargs=3, metavar=("SIZE", "LAYOUT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        size, layout, file = given.one
        Path(file).write_text(json.dumps(_measure(size, layout, given.bootstrap, quick=given.quick)))
        return
    sizes = (given.sizes or ("tiny" if given.quick else "tiny,20M,135M")).split(",")
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name, Broker(Path(name, "broker"), port=0) as broker:
        _shares(broker.bootstrap, quick=given.quick)
        if find_spec("vllm") is None:
            print("vLLM is not installed here: make vllm; .venv-vllm/bin/python -m benchmarks.vllm_rollout")
            return
        for size in sizes:
            for layout in given.layouts.split(","):
                _compare(size, layout, Path(name), broker.bootstrap, quick=given.quick)


def _shares(bootstrap: str, *, quick: bool) -> None:
    rows, claims = [], []
    for layout in get_args(Layout):
        for kind in _LOGS:
            for rate, n_tokens in _RATES:
                share = measure_share(
                    layout, kind, bootstrap, steps_per_s=rate, n_tokens=n_tokens, seconds=4.0 if quick else 10.0
                )
                ends = "none ends" if n_tokens is None else f"{n_tokens // 4} to {n_tokens} tokens each"
                rows.append((layout, kind, f"{rate:g} a second each, {ends}", share.tokens_per_s, 100 * share.outside))
                if n_tokens is None:
                    claims.append(
                        Claim(
                            name=f"vllm_rollout_share_{layout}_{kind}_{rate:g}",
                            ratio=100 * share.outside,
                            goal=3.0,
                            unit="% of one core",
                            lower_is_better=True,
                        )
                    )
    report(
        f"64 requests decode: the operator beside the engine (load {_load()})",
        ("engine's process", "log", "tokens", "tokens/s", "% of a core"),
        rows,
        claims,
    )


def _compare(size: str, layout: str, folder: Path, bootstrap: str, *, quick: bool) -> None:
    """In a process of its own: an engine leaves much behind."""
    file = folder / f"{size}-{layout}.json"
    command = [sys.executable, "-m", "benchmarks.vllm_rollout", "--one", size, layout, str(file)]
    command += ["--bootstrap", bootstrap, *(["--quick"] if quick else [])]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode:
        print(f"{size}, {layout}: not measured:\n{made.stdout[-2000:]}", file=sys.stderr)
        return
    found = json.loads(file.read_text())
    n_tokens, sides = found["n_tokens"], found["sides"]
    bare = sides["bare vLLM"]
    rows, claims = [], []
    for name, rounds in sides.items():
        rows.append(
            (
                name,
                n_tokens / min(rounds["wall_s"]),
                _ratio(bare, rounds, "wall_s", min),
                _ratio(bare, rounds, "wall_s", statistics.median),
                n_tokens / min(rounds["cpu_s"]),
                _ratio(bare, rounds, "cpu_s", min),
                _ratio(bare, rounds, "cpu_s", statistics.median),
            )
        )
        if rounds is not bare:
            claims.append(
                Claim(
                    name=f"vllm_rollout_{size}_{layout}_{name.split()[-1]}",
                    ratio=_ratio(bare, rounds, "wall_s", min),
                    goal=0.97,
                    unit="x",
                    lower_is_better=False,
                )
            )
    report(
        f"{size}, {layout}: {found['n_responses']} responses, {n_tokens / found['n_responses']:.0f} tokens each,"
        f" {found['rounds']} rounds (load {_load()})",
        ("", "tokens/s", "x, best", "x, median", "tokens/CPU-s", "x, best", "x, median"),
        rows,
        claims,
    )


def _load() -> str:
    """Of the machine: everything here is slower beside other work."""
    return ", ".join(f"{x:.1f}" for x in os.getloadavg()[:2])


def _ratio(bare: Mapping[str, list[float]], ours: Mapping[str, list[float]], key: str, of: Any) -> float:
    return float(of(bare[key]) / of(ours[key]))


def _measure(name: str, layout: Any, bootstrap: str, *, quick: bool) -> dict[str, Any]:
    """Rounds of each side in turn."""
    from benchmarks.rollout.bare import arguments, run_bare, start_bare
    from benchmarks.rollout.operate import Watched, context_of, open_bench_log, run_operator
    from benchmarks.rollout.workload import BATCH, LONGEST, SIZES, Workload, make_folder
    from laminar.operators.rollout.config import RolloutConfig, VllmEngineConfig
    from laminar.operators.rollout.engines.choice import build_engine

    size = SIZES[name]
    workload = Workload(size, quick=quick)
    n_rounds = 2 if quick else size.n_rounds
    sides: dict[str, _Rounds] = {side: _Rounds() for side in ("bare vLLM", *(f"operator, {kind}" for kind in _LOGS))}
    with tempfile.TemporaryDirectory(prefix=f"laminar-{name}-{layout}-") as temporary:
        folder = Path(temporary)
        views = make_folder(folder / "model", size)
        logs = {}
        for kind in _LOGS:
            log_folder = folder / f"{kind}-{os.getpid()}"
            log_folder.mkdir()
            logs[kind] = open_bench_log(kind, log_folder, bootstrap)
        contexts = {kind: context_of(log, kind, folder / "model") for kind, log in logs.items()}
        config = RolloutConfig(
            engine=VllmEngineConfig(process=layout, max_running=BATCH, max_model_len=LONGEST, args=arguments()),
            max_in_flight=2 * BATCH,
        )
        engine = build_engine(config.engine, contexts["sqlite"])
        engine.load(views, 0)
        vllm = start_bare(folder / "model") if layout == "own" else engine._vllm  # type: ignore[attr-defined]
        watched = Watched(engine)
        for round_ in range(n_rounds + 1):
            costs = {"bare vLLM": run_bare(vllm, workload, round_)}
            for kind, context in contexts.items():
                costs[f"operator, {kind}"] = run_operator(watched, context, config, workload, round_)
            for side, cost in costs.items():
                if round_:  # the first warms everything up
                    sides[side].wall_s.append(cost.wall_s)
                    sides[side].cpu_s.append(cost.cpu_s)
        engine.close()
        for log in logs.values():
            log.close()
    return {
        "n_tokens": workload.n_tokens,
        "n_responses": workload.n_responses,
        "rounds": n_rounds,
        "sides": {side: asdict(rounds) for side, rounds in sides.items()},
    }


if __name__ == "__main__":
    main()
