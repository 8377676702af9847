"""The self-check with a real trainer, a real relay and the torch engine: it passes what is right, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laminar.operators.operator import Context
from laminar.operators.rollout.engines import torch as torch_engine
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.rollout.engines.torch_sampler import sample
from laminar.operators.weights import TensorView, WeightSource
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from laminar.streams.deadline import Deadline
from tests.integration.rollout.self_checking import Altered, Checking, altered, manifests, model_folder, train
from tests.support.relays import RelayRun, relay_run

STEPS = 4
LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[tuple[RelayRun, Context]]:
    """Versions 0 to 4 of a run in float32."""
    with relay_run(tmp_path_factory.mktemp("run")) as relays:
        relays.relay(keep_versions=STEPS + 1)
        yield relays, train(relays, folder, steps=STEPS)


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[RelayRun]:
    with relay_run(tmp_path) as made:
        made.relay(keep_versions=3)
        yield made


def engine(folder: Path, **how: Any) -> TorchEngine:
    return TorchEngine(folder, **{"max_running": 8, "steps_per_poll": 2, **how})


def test_d2_every_version_of_a_trainer_is_confirmed(run: tuple[RelayRun, Context], folder: Path) -> None:
    relays, context = run
    checking = Checking(engine(folder), relays.source())
    found = manifests(context)
    assert sorted(found) == list(range(STEPS + 1))
    for version, manifest in found.items():
        assert checking.load(manifest)
        assert checking.engine.version == version
        assert 0 < checking.most < 1e-4
    assert sum(len(probe.lengths_P) for probe in found[0].probes) == 8
    assert len(context.codec.encode(found[0])) - len(context.codec.encode(replace(found[0], probes=()))) < 8192
    assert all(found[v].probes[0].tokens == found[0].probes[0].tokens for v in found)
    assert len({found[v].probes[0].logprobs for v in found}) == len(found)


def test_d14_without_learning_the_logprobs_stay_the_trainers(relays: RelayRun, folder: Path) -> None:
    context = train(relays, folder, steps=2, lr=0.0)
    checking = Checking(engine(folder), relays.source(), tolerance=1e-4)
    found = manifests(context)
    assert len({m.root_digest for m in found.values()}) == 1
    for manifest in found.values():
        assert checking.load(manifest)
        assert checking.most < 1e-4


def test_d2_versions_in_bfloat16_are_confirmed_and_a_wrong_one_is_not(relays: RelayRun, folder: Path) -> None:
    context = train(relays, folder, steps=1, dtype="bfloat16", publish="bfloat16")
    found = manifests(context)
    assert {probe.dtype for probe in found[1].probes} == {"bfloat16"}
    checking = Checking(engine(folder, dtype="bfloat16"), relays.source())
    assert checking.load(found[0])
    assert checking.load(found[1])
    assert 1e-4 < checking.most < 1.5
    wrong = Altered(relays.source(), lambda views: {**views, "model.layers.1.self_attn.o_proj.weight": _zeros(views)})
    assert not Checking(engine(folder, dtype="bfloat16"), wrong).load(found[1])


def _zeros(views: Mapping[str, TensorView]) -> TensorView:
    view = views["model.layers.1.self_attn.o_proj.weight"]
    return replace(view, data=memoryview(bytes(view.data.nbytes)))


@pytest.mark.parametrize(
    "how",
    [
        lambda values: values * np.float32(1.01),
        lambda values: np.where(np.arange(values.shape[1]) == 7, np.float32(0), values),
        lambda values: values[:, ::-1],
    ],
    ids=["scaled by 1.01", "one column lost", "reversed"],
)
def test_d2_a_tensor_that_was_altered_behind_the_digest_is_found(
    run: tuple[RelayRun, Context], folder: Path, how: Any
) -> None:
    relays, context = run
    source = Altered(relays.source(), lambda views: altered(views, LAYER, how))
    checking = Checking(engine(folder), source)
    assert not checking.load(manifests(context)[2])
    assert checking.engine.version == -1


class Before:
    """A source that is always one version behind."""

    def __init__(self, source: WeightSource, found: Mapping[int, r.VersionManifest]) -> None:
        self._source, self._found = source, found

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        with self._source.open(self._found[max(0, manifest.version - 1)], deadline) as views:
            yield views

    def fetch(self, manifest: r.VersionManifest) -> r.VersionManifest | None:
        return manifest


@pytest.mark.parametrize("lr", [1e-3, 3e-6])
def test_d2_the_weights_of_the_version_before_are_found(relays: RelayRun, folder: Path, lr: float) -> None:
    context = train(relays, folder, steps=1, lr=lr)
    found = manifests(context)
    checking = Checking(engine(folder), Before(relays.source(), found))
    assert checking.load(found[0])
    with pytest.raises(Unavailable, match=r"self-check of version 1: .*the engine gives .* the trainer "):
        checking.load(found[1])


def test_d2_a_load_that_does_nothing_is_found(run: tuple[RelayRun, Context], folder: Path) -> None:
    relays, context = run

    class Deaf(TorchEngine):
        """Takes its first weights only."""

        def load(self, weights: Mapping[str, TensorView], version: int) -> None:
            if self.version < 0:
                super().load(weights, version)
            self._version = version

    checking = Checking(Deaf(folder, max_running=8), relays.source())
    assert checking.load(manifests(context)[0])
    with pytest.raises(Unavailable, match="self-check of version 1"):
        checking.load(manifests(context)[1])


def test_d2_an_output_layer_in_another_order_is_found(
    relays: RelayRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = model_folder(tmp_path_factory.mktemp("untied"), tied=False)
    context = train(relays, folder, steps=1)
    swapped = Altered(relays.source(), lambda views: altered(views, "lm_head.weight", lambda head: np.roll(head, 1, 0)))
    assert Checking(engine(folder), relays.source()).load(manifests(context)[1])
    assert not Checking(engine(folder), swapped).load(manifests(context)[1])


def test_e3_raw_logprobs_are_found_though_the_tokens_are_right(
    run: tuple[RelayRun, Context], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays, context = run

    def raw(logits: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, _ = sample(logits, *how)
        return ids, torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0]

    monkeypatch.setattr(torch_engine, "sample", raw)
    assert not Checking(engine(folder), relays.source()).load(manifests(context)[0])


def test_e3_a_temperature_that_is_not_applied_is_found(
    run: tuple[RelayRun, Context], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays, context = run

    def lukewarm(logits: torch.Tensor, draw: Any, uniform: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits, replace(draw, temperature=np.minimum(1, np.ceil(draw.temperature))), uniform)

    monkeypatch.setattr(torch_engine, "sample", lukewarm)
    assert not Checking(engine(folder), relays.source()).load(manifests(context)[0])
