"""A real trainer that publishes over a real relay, and what the tests of the self-check load from it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.measure import Measures
from laminar.operators.operator import Context, ModelConfig
from laminar.operators.rollout.checked_engine import CheckedEngine
from laminar.operators.rollout.config import SelfCheckConfig
from laminar.operators.rollout.engine import Engine
from laminar.operators.rollout.loader import Loader
from laminar.operators.trainer.config import OptimizerConfig, TrainerConfig
from laminar.operators.trainer.operator import build
from laminar.operators.trainer.policy import Policy
from laminar.operators.weights import TensorView, WeightSource
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas import records as r
from laminar.streams.deadline import Deadline
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from tests.support.relays import RelayRun
from tests.support.training import group

__all__ = ["Altered", "Checking", "altered", "manifest_of", "manifests", "model_folder", "train"]


def model_folder(path: Path, *, tied: bool = True) -> Path:
    """A small Qwen2, of a shape that vLLM serves too, with words enough for probes of full size."""
    words = [chr(0x4E00 + i) for i in range(60)]
    symbol_tokenizer(words, separator="", max_length=256).save_pretrained(path)
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4 + len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.2,
            tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    model.save_pretrained(path)
    return path


def train(
    relays: RelayRun,
    folder: Path,
    *,
    steps: int,
    lr: float = 3e-3,
    dtype: Literal["float32", "bfloat16"] = "float32",
    publish: Literal["float32", "bfloat16"] = "float32",
) -> Context:
    """Versions 0 to ``steps`` of the folder's model, published by the trainer operator of a run."""
    context = relays.context("trainer-0")
    run = dataclasses.replace(
        context.run, model=ModelConfig(path=folder, dtype=publish), steps=steps, groups_per_step=2, group_size=4
    )
    context = dataclasses.replace(context, run=run)
    config = TrainerConfig(device="cpu", dtype=dtype, optimizer=OptimizerConfig(lr=lr), publish_timeout_s=30)
    trainer = build(config, context)
    with context.log.producer("test").transaction() as tx:
        for index in range(2 * steps):
            for record in group(index):
                tx.send(outgoing(context.codec, record))
    for _ in range(10_000):
        if not trainer.step(context.clock()):
            break
    trainer.close()
    assert max(manifests(context)) == steps
    return context


def manifests(context: Context) -> dict[int, r.VersionManifest]:
    """The committed versions, as a rollout reads them from the log."""
    raw = read_topic(context.log, "weights.versions", Deadline.after(30, "read manifests"))
    found = [context.codec.decode(record.value or b"") for record in raw]
    return {m.version: m for m in found if isinstance(m, r.VersionManifest) and m.state == "committed"}


def manifest_of(model: Any, version: int, *, state: r.VersionState = "committed") -> r.VersionManifest:
    """What the trainer writes of a version with the weights of ``model``."""
    policy = Policy(model, TrainerConfig(device="cpu"), total_steps=1)
    return r.VersionManifest(
        run_id="run",
        epoch=1,
        version=version,
        parent=version - 1,
        step=version,
        state=state,
        tensors=(),
        total_bytes=0,
        chunk_bytes=4096,
        chunk_digests=b"",
        root_digest="",
        relay_id="relay-0",
        relay_url="",
        relay_boot="boot",
        at_ms=0,
        probes=policy.probes(),
    )


def altered(weights: Mapping[str, TensorView], name: str, how: Any) -> dict[str, TensorView]:
    """The same weights but for one tensor, a float32 array that ``how`` is given."""
    view = weights[name]
    array = np.ascontiguousarray(how(np.frombuffer(view.data, "<f4").reshape(view.shape).copy()), dtype="<f4")
    data = memoryview(array.reshape(-1).view(np.uint8))
    return {**weights, name: TensorView(dtype="F32", shape=view.shape, data=data)}


class Altered:
    """A source whose tensors are not what was verified: a fault behind the digest."""

    def __init__(self, source: WeightSource, how: Any) -> None:
        self._source = source
        self._how = how

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        with self._source.open(manifest, deadline) as views:
            yield self._how(views)

    def fetch(self, manifest: r.VersionManifest) -> r.VersionManifest | None:
        return self._source.fetch(manifest)


class Checking:
    """An engine as the rollout operator holds it, and the loader that brings it versions."""

    def __init__(self, engine: Engine, source: WeightSource, **config: Any) -> None:
        self.measures = Measures()
        self.engine = CheckedEngine(engine, SelfCheckConfig(**config), clock=time.time, measures=self.measures)
        self.loader = Loader(self.engine, source, clock=time.time, backoff_s=0.0, backoff_max_s=0.0)

    def load(self, manifest: r.VersionManifest) -> bool:
        """Whether the version counts."""
        return self.loader.load(manifest, 0.0, timeout_s=60.0)

    @property
    def most(self) -> float:
        """The largest difference in the last check, nats."""
        return self.measures.gauges["rollout_self_check_difference_nats"]
