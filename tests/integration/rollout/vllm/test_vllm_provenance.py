"""What the log says of a token is true: its logprob and its version are those of the weights that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.trainer.loss import token_logprobs
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import Tokens
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import VOCAB, Policy, changed

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

UPDATES = 20


def _stale() -> type[VllmEngine]:
    """vLLM with its caches kept over a load: what the tests here must notice."""
    from laminar.operators.rollout.engines.vllm import VllmEngine

    class Stale(VllmEngine):
        def _drop_caches(self) -> None:
            for outputs in self._core.pause(clear_cache=False):
                self._take(outputs)

    return Stale


def _request(name: str, prompt: list[int], *, seed: int, max_tokens: int = 60, **how: Any) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, **how)
    return EngineRequest(trajectory_id=name, prompt_ids=tuple(prompt), sampling=sampling, seed=seed)


def _trainer(model: Any, prompt: Iterable[int], response: Tokens, temperature: float = 1.0) -> np.ndarray:
    """Logprob of each response token by the trainer's own function over one plain forward pass."""
    ids = [*prompt, *response.ids_T.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, len(ids) - response.n_tokens - 1 : -1]
    targets = torch.tensor([ids[-response.n_tokens :]])
    logprobs_BT, _ = token_logprobs(logits, targets, torch.tensor([temperature]))
    return logprobs_BT[0].numpy()


def _worst(policy: Policy, prompts: dict[str, list[int]], drive: Drive) -> float:
    """The largest difference between a recorded logprob and the trainer's under the recorded version."""
    worst = 0.0
    for name, prompt in prompts.items():
        response = drive.tokens(name)
        for version in set(response.versions_T.tolist()):
            here = response.versions_T == version
            expected = _trainer(policy.model(version), prompt, response)
            worst = max(worst, float(np.abs(expected - response.logprobs_T)[here].max()))
    return worst


def _prompts() -> list[list[int]]:
    """Four prompts of three blocks and more, of which two begin alike."""
    rng = np.random.default_rng(3)
    begin = rng.integers(4, VOCAB, 70).tolist()
    return [begin + rng.integers(4, VOCAB, 40).tolist() for _ in range(2)] + [
        rng.integers(4, VOCAB, n).tolist() for n in (97, 130)
    ]


def _in_flight(engine: VllmEngine, policy: Policy) -> float:
    """New weights every few steps, with requests running and waiting; the worst difference."""
    engine.load(policy.weights(0), 0)
    prompts = {f"t/{i}": _prompts()[i % 4] for i in range(10)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.submit(_request(name, prompt, seed=i))
    drive = Drive(engine)
    for version in range(1, UPDATES + 1):
        drive.poll()
        assert engine.stats().running
        engine.load(policy.weights(version), version)
    drive.until_finished(prompts)
    assert all(drive.tokens(name).n_tokens == 60 for name in prompts)
    versions = [set(drive.tokens(name).versions_T.tolist()) for name in prompts]
    assert max(map(len, versions)) >= UPDATES
    return _worst(policy, prompts, drive)


def _pinned(engine: VllmEngine, policy: Policy) -> float:
    """New weights between rounds, the same prompts in each; the worst difference."""
    worst = 0.0
    for version in range(UPDATES + 1):
        assert engine.stats().running == 0
        engine.load(policy.weights(version), version)
        prompts = {f"t/{i}": _prompts()[i % 4] for i in range(8)}
        for i, (name, prompt) in enumerate(prompts.items()):
            engine.submit(_request(name, prompt, seed=i, max_tokens=8))
        drive = Drive(engine)
        drive.until_finished(prompts)
        assert all(set(drive.tokens(name).versions_T.tolist()) == {version} for name in prompts)
        worst = max(worst, _worst(policy, prompts, drive))
    return worst


@pytest.mark.parametrize("mode", [_in_flight, _pinned], ids=["in flight", "pinned"])
def test_c4_d14_every_logprob_is_the_trainers_under_the_recorded_version_over_20_updates(
    engine: VllmEngine, policy: Policy, mode: Callable[[VllmEngine, Policy], float]
) -> None:
    assert mode(engine, policy) < 1e-4


@pytest.mark.parametrize("mode", [_in_flight, _pinned], ids=["in flight", "pinned"])
def test_caches_that_are_kept_over_a_load_are_noticed_by_these_tests(
    start: Callable[..., VllmEngine], policy: Policy, mode: Callable[[VllmEngine, Policy], float]
) -> None:
    assert mode(start(_stale()), policy) > 0.1


def test_c4_weights_that_say_their_version_agree_with_the_recorded_one_for_1000_trajectories(
    start: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = Policy(tmp_path_factory.mktemp("untied"), tied=False)
    policy.save()
    engine = start(path=policy.path, max_running=64, steps_per_poll=1)
    weights = policy.weights(0)
    for name, view in weights.items():  # every layer adds nothing, every token looks the same: the head decides
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights = changed(weights, name, np.zeros(view.shape))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        weights = changed(weights, name, np.ones(weights[name].shape))

    def saying(version: int) -> Any:
        head = np.zeros(weights["lm_head.weight"].shape)
        head[version % VOCAB] = 1.0
        return changed(weights, "lm_head.weight", head)

    version = 0
    engine.load(saying(version), version)
    lengths = np.random.default_rng(0).integers(2, 9, 1000)
    for i in range(1000):
        engine.submit(_request(f"t/{i}", [4, 5, 6], seed=i, max_tokens=int(lengths[i])))
    drive = Drive(engine)
    while len(drive.finish) < 1000:
        drive.poll()
        if version % 2 or np.random.default_rng(version).random() < 0.7:
            version += 1
            engine.load(saying(version), version)
        else:
            version += 2
            engine.load(saying(version), version)
    said = Tokens.concat([drive.tokens(f"t/{i}") for i in range(1000)])
    assert said.n_tokens == lengths.sum()
    assert (said.ids_T == said.versions_T % VOCAB).all()
    assert len(set(said.versions_T.tolist())) > 60


def test_e3_at_temperature_0_6_logprobs_are_the_trainers(engine: VllmEngine, policy: Policy) -> None:
    engine.submit(_request("t", [4, 5, 6], seed=1, temperature=0.6))
    drive = Drive(engine)
    drive.until_finished(["t"])
    response = drive.tokens("t")
    assert np.abs(_trainer(policy.model(0), [4, 5, 6], response, 0.6) - response.logprobs_T).max() < 1e-4


@pytest.mark.parametrize(
    "how", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_e4_truncated_logprobs_are_of_what_the_token_was_drawn_from_as_in_the_torch_engine(
    engine: VllmEngine, policy: Policy, how: dict[str, Any]
) -> None:
    from laminar.operators.rollout.engines.torch_sampler import Draw, _truncate

    engine.submit(_request("t", [4, 5, 6], seed=1, temperature=0.8, **how))
    engine.submit(_request("greedy", [4, 5, 6], seed=1, temperature=0.0, max_tokens=8, **how))
    drive = Drive(engine)
    drive.until_finished(["t", "greedy"])
    response = drive.tokens("t")
    ids = torch.tensor([[4, 5, 6, *response.ids_T.tolist()]])
    with torch.no_grad():
        logits = policy.model(0)(input_ids=ids, use_cache=False).logits[0, 2:-1] / 0.8
    n = response.n_tokens
    draw = Draw(
        temperature=np.full(n, 0.8, np.float32),
        top_p=np.full(n, how.get("top_p", 1.0), np.float32),
        top_k=np.full(n, how.get("top_k", 0), np.int64),
        min_p=np.full(n, how.get("min_p", 0.0), np.float32),
    )
    kept = torch.log_softmax(_truncate(logits, draw, np.zeros(n, bool)), dim=-1)
    expected = kept.gather(1, ids[0, 3:, None])[:, 0].numpy()
    assert np.abs(expected - response.logprobs_T).max() < 1e-4
    greedy = drive.tokens("greedy")
    assert np.abs(_trainer(policy.model(0), [4, 5, 6], greedy) - greedy.logprobs_T).max() < 1e-4
