"""Advantages, loss, micro-batches and optimizer, against values worked out by hand or by plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laminar.operators.trainer.advantage import group_advantages
from laminar.operators.trainer.batch import Arrival, Group
from laminar.operators.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from laminar.operators.trainer.loss import LossSums, clip_loss, token_logprobs
from laminar.operators.trainer.optimizer import adamw, learning_rate
from laminar.operators.trainer.packing import rows
from laminar.operators.trainer.policy import Policy, device_of
from laminar.operators.trainer.publish import identity_of, named_tensors, tied_names
from laminar.operators.trainer.selection import Batch, Sample, select
from laminar.schemas import records as r
from laminar.schemas.errors import CheckpointError, ConfigError
from laminar.schemas.tokens import Tokens, ids_buffer
from laminar.streams.log import TopicPartition
from tests.support.dataflow import make_prompt, make_tokens
from tests.support.training import scored


def test_advantages_are_rewards_minus_the_mean_and_optionally_over_the_std() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    scaled = group_advantages([1.0, 0.0, 0.0, 1.0], scale_by_std=True)
    assert scaled == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert group_advantages([0.1] * 3, scale_by_std=True) == [0.0] * 3
    assert group_advantages([]) == []


def _loss(logp: list[float], sampler: list[float], advantage: float, mask: list[int], **changes: Any) -> Any:
    logprobs = torch.tensor([logp], requires_grad=True)
    values: dict[str, Any] = {
        "sampler_BT": torch.tensor([sampler]),
        "advantages_B": torch.tensor([advantage]),
        "mask_BT": torch.tensor([mask], dtype=torch.uint8),
        "entropy_BT": torch.ones(1, len(logp)),
        "denominator": 1.0,
        "low": 0.2,
        "high": 0.28,
    }
    loss, sums = clip_loss(logprobs, **{**values, **changes})
    loss.backward()
    return loss.item(), sums, logprobs.grad[0].tolist()  # type: ignore[index]


def test_the_loss_is_clipped_higher_above_and_lower_below() -> None:
    inside, above, below = math.log(1.2), math.log(1.5), math.log(0.5)
    loss, sums, grad = _loss([inside - 1, above - 1, below - 1], [-1.0] * 3, 1.0, [1, 1, 1])
    assert loss == pytest.approx(-(1.2 + 1.28 + 0.5))
    assert grad == pytest.approx([-1.2, 0.0, -0.5])
    assert sums.clipped == 1
    loss, sums, grad = _loss([inside - 1, above - 1, below - 1], [-1.0] * 3, -1.0, [1, 1, 1])
    assert loss == pytest.approx(1.2 + 1.5 + 0.8)
    assert grad == pytest.approx([1.2, 1.5, 0.0])
    assert sums.clipped == 1


def test_masked_tokens_give_no_gradient_and_enter_no_metric_whatever_they_hold() -> None:
    loss, sums, grad = _loss([-1.0, float("-inf"), -3.0], [-1.0, -1.0, float("nan")], 1.0, [1, 0, 0])
    assert loss == pytest.approx(-1.0)
    assert grad == pytest.approx([-1.0, 0.0, 0.0])
    assert (sums.tokens, sums.k3, sums.entropy) == (1, 0, 1)


def test_an_all_masked_micro_batch_is_still_attached_to_the_graph() -> None:
    loss, sums, grad = _loss([-1.0, -2.0], [-1.0, -1.0], 1.0, [0, 0])
    assert (loss, grad) == (0.0, [0.0, 0.0])
    assert sums.metrics()["ess"] == 1.0


def test_with_the_trainers_own_logprobs_the_ratio_is_one_and_the_diagnostics_stay_honest() -> None:
    loss, sums, grad = _loss([-1.0, -1.0], [-3.0, -1.0], 1.0, [1, 1], correct=False)
    assert loss == pytest.approx(-2.0)
    assert grad == pytest.approx([-1.0, -1.0])
    assert sums.clipped == 0
    assert sums.metrics()["k3"] == pytest.approx((math.exp(2) - 1 - 2) / 2)


def test_k3_and_effective_sample_size_have_their_textbook_values() -> None:
    _, sums, _ = _loss([math.log(2.0) - 1, math.log(0.5) - 1], [-1.0, -1.0], 0.0, [1, 1])
    metrics = sums.metrics()
    assert metrics["ess"] == pytest.approx((2 + 0.5) ** 2 / (2 * (4 + 0.25)))
    assert metrics["k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)


def test_logprobs_are_of_the_temperature_that_was_sampled_at() -> None:
    logits = torch.tensor([[[1.0, 2.0, float("-inf")]]])
    logp, entropy = token_logprobs(logits, torch.tensor([[1]]), torch.tensor([0.5]))
    p = math.exp(4) / (math.exp(2) + math.exp(4))
    assert float(logp) == pytest.approx(math.log(p))
    assert float(entropy) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)))


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    constant = OptimizerConfig(lr=2.0, warmup_steps=4)
    assert [learning_rate(s, 10, constant) for s in (1, 4, 5, 10)] == [0.5, 2.0, 2.0, 2.0]
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    values = [learning_rate(s, 10, cosine) for s in range(1, 12)]
    assert values[1] == 2.0
    assert values[5] == pytest.approx(1.1)
    assert values[9] == values[10] == pytest.approx(0.2)
    assert values[1:] == sorted(values[1:], reverse=True)


def test_weight_decay_spares_vectors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    groups = adamw(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert [(g["weight_decay"], [tuple(p.shape) for p in g["params"]]) for g in groups] == [
        (0.1, [(2, 3)]),
        (0.0, [(2,), (2,), (2,)]),
    ]


def _tiny(seed: int = 0, **changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**config, **changes}))


def _samples(seed: int = 0, temperature: float = 1.0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index in range(9):
        prompt_P = rng.integers(0, 40, int(rng.integers(1, 9)))
        n = int(rng.integers(1, 12))
        prompt = make_prompt(
            index,
            prompt_tokens=ids_buffer(prompt_P),
            n_prompt_tokens=len(prompt_P),
            sampling=r.Sampling(max_tokens=32, temperature=temperature),
        )
        made = scored(prompt).trajectory
        values = {f: getattr(made, f) for f in made.__dataclass_fields__}
        response = Tokens.build(ids=rng.integers(0, 40, n), logprobs=-rng.random(n).astype(np.float32) * 5, version=0)
        mask = rng.integers(0, 2, n).astype(np.uint8) if index % 3 == 0 else np.ones(n, np.uint8)
        response = Tokens(
            n_tokens=n, ids=response.ids, logprobs=response.logprobs, versions=response.versions, mask=mask.tobytes()
        )
        samples.append(
            Sample(trajectory=r.CompletedTrajectory(**{**values, "response": response}), advantage=rng.normal())
        )
    return samples


def _batch(samples: list[Sample]) -> Batch:
    n = sum(int(s.trajectory.response.mask_T.sum()) for s in samples)
    return Batch(samples=tuple(samples), dropped=(), denominator=n, n_tokens=n, staleness={}, metrics={})


def _gradients(samples: list[Sample], budget: int, temperature: float = 1.0) -> tuple[dict[str, Any], float]:
    model = _tiny()
    config = TrainerConfig(micro_batch_tokens=budget, device="cpu", optimizer=OptimizerConfig(clip_norm=1e9))
    policy = Policy(model, config, total_steps=1)
    policy.begin(_batch(samples), 1)
    while policy.advance():
        pass
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    return gradients, policy.finish()["loss"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padded_micro_batches_give_the_gradient_of_one_sequence_at_a_time(temperature: float) -> None:
    samples = _samples(temperature=temperature)
    model = _tiny().eval()
    total = torch.zeros(())
    for sample in samples:
        made = sample.trajectory
        prompt_P = np.frombuffer(made.prompt.prompt_tokens, np.int32)
        ids = torch.tensor([[*prompt_P.tolist(), *made.response.ids_T.tolist()]])
        logp = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
        for t in range(made.response.n_tokens):
            if made.response.mask_T[t]:
                w = (logp[len(prompt_P) + t - 1, ids[0, len(prompt_P) + t]] - float(made.response.logprobs_T[t])).exp()
                total = total + torch.minimum(w * sample.advantage, w.clamp(0.8, 1.28) * sample.advantage)
    loss = -total / _batch(samples).denominator
    loss.backward()
    for budget in (1, 40, 10_000):
        gradients, value = _gradients(samples, budget)
        assert value == pytest.approx(loss.item(), abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_greedy_and_raw_logprobs_are_read_at_temperature_1() -> None:
    greedy = _samples(temperature=0.0)[0]
    values = {f: getattr(greedy.trajectory, f) for f in greedy.trajectory.__dataclass_fields__}
    hot = make_prompt(sampling=r.Sampling(max_tokens=4, temperature=2.0))
    raw = r.CompletedTrajectory(**{**values, "prompt": hot, "logprobs_mode": "raw"})
    processed = r.CompletedTrajectory(**{**values, "prompt": hot})
    made = rows([greedy, Sample(trajectory=raw, advantage=0.0), Sample(trajectory=processed, advantage=0.0)])
    assert made.temperature_B.tolist() == [1.0, 1.0, 2.0]


def test_an_empty_batch_leaves_the_weights_as_they_are() -> None:
    model = _tiny()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    policy = Policy(model, TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1.0)), total_steps=1)
    policy.begin(_batch([]), 1)
    assert not policy.advance()
    assert policy.finish()["skipped_update"] == 1.0
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = _tiny()
    policy = Policy(model, TrainerConfig(device="cpu"), total_steps=1)
    sample = _samples()[1]
    policy.begin(_batch([Sample(trajectory=sample.trajectory, advantage=float("nan"))]), 1)
    policy.advance()
    assert policy.finish()["skipped_update"] == 1.0
    assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def test_bfloat16_trains_close_to_float32_and_keeps_float32_parameters() -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        model = _tiny()
        policy = Policy(model, TrainerConfig(device="cpu", dtype=dtype), total_steps=1)
        policy.begin(_batch(_samples()), 1)
        while policy.advance():
            pass
        losses.append(policy.finish()["loss"])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_a_policy_that_was_saved_and_loaded_goes_on_exactly_as_it_would_have(tmp_path: Path) -> None:
    def train(policy: Policy, step: int) -> None:
        policy.begin(_batch(_samples(step)), step)
        while policy.advance():
            pass
        policy.finish()

    config = TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))
    one, other = _tiny(), _tiny(seed=1)
    policy = Policy(one, config, total_steps=5)
    train(policy, 1)
    policy.save(tmp_path)
    train(policy, 2)
    resumed = Policy(other, config, total_steps=5)
    resumed.load(tmp_path)
    train(resumed, 2)
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in one.state_dict().items())


def test_a_damaged_learner_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    policy = Policy(_tiny(), TrainerConfig(device="cpu"), total_steps=1)
    (tmp_path / "learner.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"learner\.pt: damaged"):
        policy.load(tmp_path)


def test_d11_tied_weights_are_declared_and_everything_else_is_published_once() -> None:
    model = _tiny()
    tied = tied_names(model)
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    published = {t.name: t for t in named_tensors(model, torch.bfloat16, tied)}
    assert set(published) | set(tied) == set(model.state_dict())
    assert not set(published) & set(tied)
    for name, tensor in published.items():
        expected = model.state_dict()[name].to(torch.bfloat16)
        got = torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).reshape(tensor.shape)
        assert tensor.dtype == "BF16"
        assert torch.equal(got, expected)
    assert tied_names(_tiny(tie_word_embeddings=False)) == {}


def test_a_model_of_another_shape_has_another_identity() -> None:
    assert identity_of(_tiny()) == identity_of(_tiny(seed=5))
    assert identity_of(_tiny()) != identity_of(_tiny(intermediate_size=48))


def test_an_unknown_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="valid: auto, cpu, cuda"):
        device_of("gpu")


def _group(members: list[r.ScoredTrajectory]) -> Group:
    arrivals = {
        m.trajectory.trajectory_id: Arrival(
            scored=m, source=TopicPartition("trajectories.scored", 0), offset=i, value=b""
        )
        for i, m in enumerate(members)
    }
    return Group(group_id=members[0].trajectory.group_id, members=arrivals)


@pytest.mark.parametrize(
    ("policy", "trained", "advantage", "denominator"),
    [("keep", 4, 0.5, 24), ("mask", 3, 0.5, 24), ("drop", 3, 1 / 3, 14)],
)
def test_f7_a_truncated_answer_follows_its_policy(
    policy: Any, trained: int, advantage: float, denominator: int
) -> None:
    prompt = make_prompt(0)
    members = [scored(prompt, m, n=10 if m == 3 else (4 if m == 2 else 5)) for m in range(4)]
    cut = members[3].trajectory
    values = {f: getattr(cut, f) for f in cut.__dataclass_fields__}
    members[3] = r.ScoredTrajectory(
        trajectory=r.CompletedTrajectory(**{**values, "finish": "length"}),
        reward=0.0,
        function="exact",
        latency_ms=0,
        scored_ms=0,
    )
    batch = select([_group(members)], version=0, max_staleness=None, config=AlgorithmConfig(truncated=policy))
    assert len(batch.samples) == trained
    assert batch.samples[0].advantage == pytest.approx(advantage)
    assert batch.denominator == denominator
    reasons = [d.reason for d in batch.dropped]
    assert reasons == ([] if policy == "keep" else ["truncated"])


def test_c2_staleness_is_of_the_oldest_version_in_a_trajectory_and_of_each_token() -> None:
    prompt = make_prompt(0)
    members = [scored(prompt, m, float(m == 0), n=4) for m in range(4)]
    response = Tokens.concat([make_tokens(1, 1), make_tokens(2, 2), make_tokens(1, 4)])
    flown = replace(members[0].trajectory, response=response, version_min=1, version_max=4, updates="in_flight")
    members[0] = replace(members[0], trajectory=flown)

    def batch(max_staleness: int) -> Batch:
        config = AlgorithmConfig(zero_advantage="keep", min_group=1)
        return select([_group(members)], version=4, max_staleness=max_staleness, config=config)

    assert batch(4).staleness == {"3": 1, "4": 3}
    metrics = batch(4).metrics
    assert metrics["versions_mean"] == (3 + 1 + 1 + 1) / 4
    assert metrics["staleness_token_mean"] == (3 + 2 + 2 + 0 + 3 * 4 * 4) / 16
    assert metrics["staleness_mean"] == (3 + 3 * 4) / 4
    members[1:] = [scored(prompt, m, 0.0, n=4, version=4) for m in range(1, 4)]
    assert [d.reason for d in batch(2).dropped] == ["stale"]  # three tokens are young enough, the first is not
    assert batch(3).dropped == ()


def test_zero_advantages_can_be_kept() -> None:
    prompt = make_prompt(0)
    members = [scored(prompt, m, 1.0) for m in range(4)]
    kept = select([_group(members)], version=0, max_staleness=None, config=AlgorithmConfig(zero_advantage="keep"))
    assert [s.advantage for s in kept.samples] == [0.0] * 4
    assert kept.dropped == ()


def test_sums_add_up_over_micro_batches() -> None:
    one = LossSums(loss=1.0, tokens=2, k3=3)
    assert (one + one).metrics()["k3"] == pytest.approx(1.5)
    assert (one + one).loss == 2.0
