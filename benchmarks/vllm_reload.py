"""New weights into vLLM: from the manifest to the first token under them, beside a plain copy of the same bytes.

``python -m benchmarks.vllm_reload [--quick] [--sizes 20M,135M] [--layouts shared,own]``

A trainer publishes version after version into a relay (another process); the rollout's side opens the relay's slot,
loads it into an idle engine in this process or in its own, and asks for one token. The reference copies the bytes of
the same slot once into memory that is already there, in turn with the loads, and the best of each counts. vLLM copies
more than once: a layer is put together in new memory, packed for its kernels, and copied to where the old one lies.

The second claim: what anonymous memory the engine's process gains over 100 loads, once it has loaded ten times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.claim import Claim, report
from benchmarks.rollout.workload import SIZES, make_folder
from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.operator import RelayOperator
from laminar.operators.relay.publisher import RelayPublisher
from laminar.operators.relay.source import RelaySource
from laminar.operators.rollout.config import VllmEngineConfig
from laminar.operators.rollout.engine import Engine, EngineRequest
from laminar.operators.rollout.engines.choice import build_engine
from laminar.operators.weights import NamedTensor
from laminar.schemas.codec import Codec
from laminar.schemas.records import Sampling
from laminar.streams.deadline import Deadline
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import topic_specs

__all__ = ["main"]

_LAYOUTS = ("shared", "own")
_WARM = 10
"""Loads after which the process has what it needs."""
_GOAL_TIME = 24.0
_GOAL_MEMORY = 0.2
"""Of the weights' bytes, over 100 loads."""


def main() -> None:
    """Measure, print the tables and the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="measure less: the smaller model, 30 loads")
    parser.add_argument("--sizes", help="of the models, with commas between")
    parser.add_argument("--layouts", default=",".join(_LAYOUTS))
    parser.add_argument("--one", nargs=3, metavar=("SIZE", "LAYOUT", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not installed here: make vllm; .venv-vllm/bin/python -m benchmarks.vllm_reload")
        return
    if given.one:
        size, layout, file = given.one
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
            Path(file).write_text(json.dumps(_measure(size, layout, Path(name), quick=given.quick)))
        return
    sizes = (given.sizes or ("20M" if given.quick else "20M,135M")).split(",")
    for size in sizes:
        for layout in given.layouts.split(","):
            found = _in_a_process(size, layout, quick=given.quick)
            if found is not None:
                _tell(size, layout, found)


def _tell(size: str, layout: str, found: Mapping[str, Any]) -> None:
    n_bytes, copy_s = found["n_bytes"], min(found["copy"])
    parts = list(zip(found["open"], found["load"], found["first"], strict=True))
    best = min(parts, key=sum)
    rows = [("copy", 1e3 * copy_s, 1.0, 1e3 * statistics.median(found["copy"]))]
    for i, name in enumerate(("open", "load", "first token")):
        rows.append((name, 1e3 * best[i], best[i] / copy_s, 1e3 * statistics.median(part[i] for part in parts)))
    total = sum(best) / copy_s
    rows.append(("open to first token", 1e3 * sum(best), total, 1e3 * statistics.median(map(sum, parts))))
    name = f"vllm_reload_{size}_{layout}"
    report(
        f"{size}, {layout}: {n_bytes / 1e6:.0f} MB, {len(parts)} loads, {found['grown'] / 1e6:.1f} MB more after 100"
        f" (load {os.getloadavg()[0]:.1f})",
        ("", "ms, best", "x copy", "ms, median"),
        rows,
        [
            Claim(name=name, ratio=total, goal=_GOAL_TIME, unit="x", lower_is_better=True),
            Claim(
                name=f"{name}_memory", ratio=found["grown"] / n_bytes, goal=_GOAL_MEMORY, unit="x", lower_is_better=True
            ),
        ],
    )


def _in_a_process(size: str, layout: str, *, quick: bool) -> dict[str, Any] | None:
    """An engine leaves much behind."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.vllm_reload", "--one", size, layout, file.name]
        made = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode:
            print(f"{size}, {layout}: not measured:\n{made.stdout[-2000:]}", file=sys.stderr)
            return None
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


def _context(folder: Path, instance: str) -> Context:
    model = ModelConfig(path=folder / "model", dtype="bfloat16")
    run = RunInfo(
        run_id="bench",
        run_dir=folder,
        steps=1,
        groups_per_step=1,
        group_size=1,
        max_staleness=None,
        seed=0,
        model=model,
    )
    log = SqliteLog(folder / "log")
    log.create_topics(topic_specs())
    return Context(run=run, name=instance.split("-")[0], instance=instance, log=log, codec=Codec())


def _serve(folder: str, shm: str, stop: Event) -> None:
    """A relay process."""
    relay = RelayOperator(RelayConfig(shm_root=Path(shm), keep_versions=2, heartbeat_s=0.5), _context_of(folder))
    while not stop.is_set():
        if not relay.step(time.time()):
            stop.wait(0.01)
    while not relay.drain(time.time()):
        stop.wait(0.01)
    relay.close()


def _context_of(folder: str) -> Context:
    return _context(Path(folder), "relay-0")


@contextmanager
def _relay(folder: Path) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir="/dev/shm") as shm:
        process = spawn.Process(target=_serve, args=(str(folder), shm, stop))
        process.start()
        try:
            yield
        finally:
            stop.set()
            process.join(30)
            process.kill()


def _measure(size: str, layout: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Seconds of each part of each load, and the bytes that the engine's process gained."""
    make_folder(folder / "model", SIZES[size])
    state: dict[str, Any] = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in load_file(folder / "model" / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    named = [
        NamedTensor(
            name=name,
            dtype="BF16",
            shape=tuple(tensor.shape),
            data=memoryview(tensor.reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in state.items()
    ]
    n_bytes = sum(one.data.nbytes for one in named)
    target = [np.zeros(one.data.nbytes, dtype=np.uint8) for one in named]
    context = _context(folder, "rollout-0")
    config = VllmEngineConfig(process=layout, max_running=8, max_model_len=128, kv_total=1024)  # type: ignore[arg-type]
    took: dict[str, list[float]] = {"copy": [], "open": [], "load": [], "first": []}

    def timed(part: str, call: Callable[[], object]) -> None:
        begun = time.perf_counter()
        call()
        took[part].append(time.perf_counter() - begun)

    with _relay(folder):
        engine = build_engine(config, context)
        publisher, source = RelayPublisher.from_context(context), RelaySource.from_context(context)
        limit = Deadline.after(3600, "benchmark")
        gained = 0
        n = (20 if quick else 100) + _WARM
        for version in range(n):
            next(iter(state.values()))[0, 0] = version % 7
            prepared = publisher.stage(
                named, tied={}, epoch=0, version=version, parent=version - 1, step=version, deadline=limit
            )
            manifest = publisher.seal(prepared, limit)
            begun = time.perf_counter()
            with source.open(manifest, limit) as views:
                took["open"].append(time.perf_counter() - begun)
                timed("load", lambda: engine.load(views, version))  # noqa: B023
                timed("first", lambda: _first_token(engine, version))  # noqa: B023
                timed("copy", lambda: _copy(views, named, target))
            if version == _WARM - 1:
                gained = -_anonymous(engine)
        gained += _anonymous(engine)
        engine.close()
        publisher.close()
        source.close()
    return {"n_bytes": n_bytes, "grown": gained * 100 / (n - _WARM), **took}


def _first_token(engine: Engine, version: int) -> None:
    """Ask for one token, and wait for it."""
    name = f"bench/{version}"
    sampling = Sampling(max_tokens=1)
    engine.submit(EngineRequest(trajectory_id=name, prompt_ids=(4, 5, 6, 7), sampling=sampling, seed=version))
    deltas = engine.poll(0.0)
    while not deltas:
        deltas = engine.poll(0.0)
    if set(deltas[0].tokens.versions_T.tolist()) != {version}:
        raise RuntimeError(f"version {version}: {deltas}")


def _copy(views: Any, named: list[NamedTensor], target: list[np.ndarray]) -> None:
    for one, into in zip(named, target, strict=True):
        np.copyto(into, np.frombuffer(views[one.name].data, dtype=np.uint8))


def _anonymous(engine: Engine) -> int:
    """Bytes of memory that are the engine's process' alone."""
    pid = getattr(engine, "pid", None) or "self"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


if __name__ == "__main__":
    main()
