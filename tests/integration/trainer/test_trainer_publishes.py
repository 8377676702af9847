"""The trainer as a run builds it: a model folder, a real relay, and what a rollout loads from it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.operators.operator import Context, ModelConfig
from laminar.operators.trainer.config import OptimizerConfig, TrainerConfig
from laminar.operators.trainer.operator import Trainer, build
from laminar.schemas import records as r
from laminar.schemas.errors import CheckpointError, ConfigError
from laminar.streams.deadline import Deadline
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from tests.support.relays import RelayRun
from tests.support.training import group


def _model(path: Path, hidden: int = 16) -> ModelConfig:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=hidden,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(path)
    return ModelConfig(path=path, dtype="bfloat16")


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[RelayRun]:
    shm = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    run = RelayRun(tmp_path, shm)
    yield run
    run.close()
    shutil.rmtree(shm, ignore_errors=True)


def _context(relays: RelayRun, model: ModelConfig, steps: int = 3) -> Context:
    context = relays.context("trainer-0")
    run = dataclasses.replace(context.run, model=model, steps=steps, groups_per_step=2, group_size=4)
    return dataclasses.replace(context, run=run)


def _settle(trainer: Trainer, context: Context) -> None:
    for _ in range(1000):
        if not trainer.step(context.clock()):
            return
    raise AssertionError("the trainer does not come to rest")


def _of(context: Context, topic: str, kind: type) -> list[r.Record]:
    raw = read_topic(context.log, topic, Deadline.after(5, "read"))
    return [x for record in raw if isinstance(x := context.codec.decode(record.value or b""), kind)]


def _feed(context: Context, first: int, n: int) -> None:
    with context.log.producer("test").transaction() as tx:
        for index in range(first, first + n):
            for record in group(index):
                tx.send(outgoing(context.codec, record))


def test_a_rollout_maps_exactly_the_weights_that_the_trainer_holds(relays: RelayRun, tmp_path: Path) -> None:
    relays.relay()
    context = _context(relays, _model(tmp_path / "model"))
    config = TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2), publish_timeout_s=20)
    trainer = build(config, context)
    _settle(trainer, context)
    _feed(context, 0, 4)
    _settle(trainer, context)
    trainer.close()
    steps = _of(context, "training.steps", r.TrainingStep)
    assert [s.step for s in steps if isinstance(s, r.TrainingStep)] == [1, 2]
    manifests = [m for m in _of(context, "weights.versions", r.VersionManifest) if isinstance(m, r.VersionManifest)]
    assert [(m.version, m.state) for m in manifests] == [
        (v, state) for v in (0, 1, 2) for state in ("prepared", "committed")
    ]
    assert len({m.root_digest for m in manifests}) == 3
    saved = torch.load(tmp_path / "run" / "checkpoints" / "00000002.0" / "learner.pt", weights_only=True)["model"]
    with relays.source().open(manifests[-1], Deadline.after(20, "open")) as tensors:
        assert set(tensors) | set(manifests[-1].tied) == set(saved)
        for name, view in tensors.items():
            got = torch.frombuffer(bytearray(view.data), dtype=torch.bfloat16).reshape(view.shape)
            assert torch.equal(got, saved[name].to(torch.bfloat16))


def test_training_goes_on_without_a_relay_and_publishes_once_there_is_one(relays: RelayRun, tmp_path: Path) -> None:
    context = _context(relays, _model(tmp_path / "model"))
    trainer = build(TrainerConfig(device="cpu", publish_timeout_s=0.2, publish_retry_s=0.01), context)
    _feed(context, 0, 4)
    _settle(trainer, context)
    assert len(_of(context, "training.steps", r.TrainingStep)) == 2
    assert _of(context, "weights.versions", r.VersionManifest) == []
    relays.relay()
    deadline = Deadline.after(20, "version 2 is committed")
    while len(_of(context, "weights.versions", r.VersionManifest)) < 2:
        trainer.step(context.clock())
        deadline.check()
    trainer.close()
    newest = _of(context, "weights.versions", r.VersionManifest)[-1]
    assert isinstance(newest, r.VersionManifest)
    assert (newest.version, newest.state) == (2, "committed")


def test_a_checkpoint_of_another_model_is_refused_in_one_line(relays: RelayRun, tmp_path: Path) -> None:
    config = TrainerConfig(device="cpu", publish_timeout_s=0.1)
    context = _context(relays, _model(tmp_path / "model"))
    trainer = build(config, context)
    _feed(context, 0, 2)
    _settle(trainer, context)
    trainer.close()
    context = _context(relays, _model(tmp_path / "other", hidden=32))
    trainer = build(config, context)
    with pytest.raises(
        CheckpointError, match=r"saved from model LlamaForCausalLM/.* this run's model is Llama"
    ) as caught:
        _settle(trainer, context)
    assert "\n" not in str(caught.value)
    trainer.close()


def test_a_missing_model_folder_is_a_config_error(relays: RelayRun, tmp_path: Path) -> None:
    context = _context(relays, ModelConfig(path=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"model\.path: .*nothing is no model folder"):
        build(TrainerConfig(device="cpu"), context)
