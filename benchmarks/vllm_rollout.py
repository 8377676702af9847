"""The rollout operator around vLLM beside bare vLLM: tokens per CPU-second, same requests, same process layout.

Both sample 64 sequences at a time in this process, on one thread, at temperature 1 with the logprob of every token;
each request ends after its own number of tokens. Bare vLLM is its ``LLMEngine`` in a loop, with text, deltas and
statistics switched off. The operator takes the prompts from a SQLite log and writes every token, finished trajectory
and heartbeat to it. Rounds of the two alternate, and the best of each counts. A model this small (78,400 parameters)
makes everything around it large.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.vllm import VllmEngine
from laminar.operators.rollout.operator import Rollout
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.sortl import TASK
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Unavailable
from laminar.schemas.records import Prompt, Sampling, VersionManifest
from laminar.schemas.tokens import ids_buffer
from laminar.streams.deadline import Deadline
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs

_BATCH = 64
_GROUP = 8
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    changes: Mapping[str, int]
    """To the quickstart's model."""
    n_groups: int
    n_tokens: int
    """The median of a response."""


_SIZES = (
    _Size("tiny", {}, 64, 100),
    _Size(
        "20M", {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}, 16, 50
    ),
)


def main() -> None:
    """Measure, print the tables and the claims."""
    quick = quick_from_arguments(__doc__)
    if find_spec("vllm") is None:
        print("vLLM is not installed here: make vllm; .venv-vllm/bin/python -m benchmarks.vllm_rollout")
        return
    for size in _SIZES:
        _measure(size, quick=quick)


def _measure(size: _Size, *, quick: bool) -> None:
    n_groups = size.n_groups // 2 if quick else size.n_groups
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(size.n_tokens), 0.5, n_groups)).astype(int), 16, 400).tolist()
    prompts = [rng.integers(4, 28, 24).tolist() for _ in range(n_groups)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        views = _model(path, size.changes)
        engine = VllmEngine(path, max_running=_BATCH, max_model_len=_LONGEST, eos_token_ids=())
        engine.load(views, 0)
        bare_s, operator_s = [], []
        for i in range(2 if quick else 3):
            bare_s.append(_bare(engine, prompts, lengths, i))
            operator_s.append(_operator(engine, prompts, lengths, Path(folder) / f"log{i}"))
        engine.close()
    wanted = sum(lengths) * _GROUP
    bare, ours = min(bare_s), min(operator_s)
    report(
        f"{size.name}: {n_groups * _GROUP} responses, {wanted / n_groups / _GROUP:.0f} tokens each, batch {_BATCH}",
        ("", "CPU s", "tokens per CPU-second"),
        [("rollout operator", ours, wanted / ours), ("bare vLLM", bare, wanted / bare)],
        [Claim(name=f"vllm_rollout_{size.name}", ratio=bare / ours, goal=0.97, unit="x", lower_is_better=False)],
    )


def _model(path: Path, changes: Mapping[str, int]) -> dict[str, TensorView]:
    tokenizer = TASK.tokenizer()
    torch.manual_seed(0)
    config = TASK.model(tokenizer).config
    for name, value in {**changes, "max_position_embeddings": _LONGEST}.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return {
        name: TensorView(
            dtype="F32",
            shape=tuple(tensor.shape),
            data=memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def _bare(engine: VllmEngine, prompts: list[list[int]], lengths: list[int], seed: int) -> float:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm: Any = engine._vllm
    vllm.reset_prefix_cache()
    began = time.process_time()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        for member in range(_GROUP):
            how = SamplingParams(
                max_tokens=length,
                temperature=1.0,
                logprobs=0,
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                seed=1 + seed * 10**6 + i * _GROUP + member,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            vllm.add_request(f"{seed}/{i}/{member}", {"prompt_token_ids": prompt}, how)
    n = 0
    while vllm.has_unfinished_requests():
        n += sum(len(output.outputs[0].token_ids) for output in vllm.step())
    assert n == sum(lengths) * _GROUP
    return time.process_time() - began


class _Watched:
    """An engine that outlives the operator, and counts what it finished."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.n_finished = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def poll(self, timeout_s: float) -> list[Delta]:
        """See Engine.poll."""
        deltas = self._engine.poll(timeout_s)
        self.n_finished += sum(delta.finish is not None for delta in deltas)
        return deltas

    def close(self) -> None:
        """Nothing: it is used again."""


def _operator(engine: VllmEngine, prompts: list[list[int]], lengths: list[int], folder: Path) -> float:
    log = SqliteLog(folder)
    log.create_topics(topic_specs())
    run = RunInfo(
        run_id="bench",
        run_dir=folder,
        steps=1,
        groups_per_step=1,
        group_size=_GROUP,
        max_staleness=None,
        seed=0,
        model=ModelConfig(path=folder),
    )
    context = Context(run=run, name="rollout", instance="rollout-0", log=log, codec=Codec())
    with log.producer("bench.test").transaction() as tx:
        for record in (_manifest(), *_groups(prompts, lengths)):
            tx.send(outgoing(context.codec, record))
    watched: Any = _Watched(engine)
    rollout = Rollout(RolloutConfig(max_in_flight=_BATCH + _GROUP), context, engine=watched, weights=_NoWeights())
    began = time.process_time()
    while watched.n_finished < len(prompts) * _GROUP:
        if not rollout.step(time.time()):
            time.sleep(0.001)  # as the runner does
    while not rollout.drain(time.time()):
        pass
    took = time.process_time() - began
    rollout.close()
    log.close()
    return took


class _NoWeights:
    """Nobody asks: the engine holds the only version."""

    def open(self, manifest: VersionManifest, deadline: Deadline) -> AbstractContextManager[Mapping[str, TensorView]]:  # noqa: ARG002
        raise Unavailable("no weights here")


def _manifest() -> VersionManifest:
    return VersionManifest(
        run_id="bench",
        epoch=0,
        version=0,
        parent=-1,
        step=0,
        state="committed",
        tensors=(),
        total_bytes=0,
        chunk_bytes=4096,
        chunk_digests=b"",
        root_digest="",
        relay_id="relay-0",
        relay_url="",
        relay_boot="boot",
        at_ms=0,
    )


def _groups(prompts: list[list[int]], lengths: list[int]) -> Iterator[Prompt]:
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        yield Prompt(
            prompt_id=f"bench/0/{i}",
            dataset="bench",
            epoch=0,
            index=i,
            purpose="train",
            task="bench",
            group_size=_GROUP,
            prompt_tokens=ids_buffer(prompt),
            n_prompt_tokens=len(prompt),
            prompt_text="",
            sampling=Sampling(max_tokens=length),
            seed=i,
            created_ms=0,
        )


if __name__ == "__main__":
    main()
