"""The self-check on vLLM: what is right passes, and each of the ways in which vLLM was ever wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from laminar.operators.weights import TensorView
from laminar.schemas import records as r
from laminar.schemas.errors import Unavailable
from laminar.streams.deadline import Deadline
from tests.integration.rollout.self_checking import Checking, manifest_of, manifests, train
from tests.integration.rollout.vllm.conftest import Policy, changed
from tests.support.relays import relay_run

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

Weights = Mapping[str, TensorView]


class Versions:
    """A source of the policy's versions, as ``how`` makes them, and the manifests that the trainer writes of them."""

    def __init__(self, policy: Policy, how: Callable[[int], Weights] | None = None) -> None:
        self._policy = policy
        self._how = how or policy.weights

    def manifest(self, version: int) -> r.VersionManifest:
        return manifest_of(self._policy.model(version), version)

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Weights]:
        yield self._how(manifest.version)

    def fetch(self, manifest: r.VersionManifest) -> r.VersionManifest | None:
        return manifest


def test_d2_five_versions_are_confirmed(engine: VllmEngine, policy: Policy) -> None:
    versions = Versions(policy)
    checking = Checking(engine, versions)
    for version in range(1, 6):
        assert checking.load(versions.manifest(version))
        assert checking.engine.version == version
        assert checking.most < 1e-4
    assert engine.stats().running == engine.stats().waiting == 0


def test_d14_without_learning_the_logprobs_stay_the_trainers(
    engine: VllmEngine, policy: Policy, tmp_path: Path
) -> None:
    with relay_run(tmp_path) as relays:
        relays.relay(keep_versions=3)
        found = manifests(train(relays, policy.path, steps=2, lr=0.0))
        assert len({manifest.root_digest for manifest in found.values()}) == 1
        checking = Checking(engine, relays.source(), tolerance=1e-4)
        for _, manifest in sorted(found.items()):
            assert checking.load(manifest)
            assert 0 < checking.most < 1e-4


def test_d2_the_weights_of_the_version_before_are_found(engine: VllmEngine, policy: Policy) -> None:
    versions = Versions(policy, lambda version: policy.weights(max(1, version - 1)))
    checking = Checking(engine, versions)
    assert checking.load(versions.manifest(1))
    with pytest.raises(Unavailable, match=r"self-check of version 2: .*the engine gives .* the trainer "):
        checking.load(versions.manifest(2))
    assert checking.engine.version == -1


def test_d2_a_tensor_that_was_altered_behind_the_digest_is_found(engine: VllmEngine, policy: Policy) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"

    def scaled(version: int) -> Weights:
        weights = policy.weights(version)
        values = np.frombuffer(weights[name].data, "<f4").reshape(weights[name].shape)
        return changed(weights, name, values * np.float32(1.01))

    versions = Versions(policy, scaled)
    assert not Checking(engine, versions).load(versions.manifest(1))


def test_d2_a_prefix_cache_that_is_kept_over_a_load_is_found(
    engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = Versions(policy)
    checking = Checking(engine, versions)
    assert checking.load(versions.manifest(1))

    def keep() -> None:
        for outputs in engine._core.pause(clear_cache=False):
            engine._take(outputs)

    monkeypatch.setattr(engine, "_drop_caches", keep)
    with pytest.raises(Unavailable, match=r"self-check of version 2: .* after (33|40|48) tokens"):
        checking.load(versions.manifest(2))


def test_d2_a_packed_output_layer_that_is_left_as_it_was_is_found(
    engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from laminar.operators.rollout.engines import vllm_worker

    versions = Versions(policy)
    checking = Checking(engine, versions)
    assert checking.load(versions.manifest(1))
    monkeypatch.setattr(vllm_worker, "_pack_heads", lambda model: None)
    with pytest.raises(Unavailable, match="self-check of version 2"):
        checking.load(versions.manifest(2))


@pytest.fixture
def raw(engine: VllmEngine) -> Iterator[None]:
    """vLLM reports logprobs of temperature 1 and the whole vocabulary."""
    engine._vllm.collective_rpc(_report, args=("raw_logprobs",))
    yield
    engine._vllm.collective_rpc(_report, args=("processed_logprobs",))


def _report(worker: Any, mode: str) -> None:
    sampler = worker.model_runner.sampler
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode


@pytest.mark.usefixtures("raw")
def test_e3_raw_logprobs_are_found(engine: VllmEngine, policy: Policy) -> None:
    versions = Versions(policy)
    assert not Checking(engine, versions).load(versions.manifest(1))
