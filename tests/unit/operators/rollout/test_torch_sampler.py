"""Drawing tokens for a batch of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laminar.operators.rollout.engines.torch_sampler import Draw, sample, stream_key, uniforms

N = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -4.0])


def _draw(
    n: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """``n`` tokens from LOGITS, one from each of the first n positions of a stream: ids and logprobs."""
    draw = Draw(
        temperature=np.full(n, temperature, dtype=np.float32),
        top_p=np.full(n, top_p, dtype=np.float32),
        top_k=np.full(n, top_k, dtype=np.int64),
        min_p=np.full(n, min_p, dtype=np.float32),
    )
    keys = np.full(n, stream_key(5), dtype=np.uint64)
    ids, logprobs = sample(LOGITS.expand(n, -1).clone(), draw, uniforms(keys, np.arange(n)))
    return ids.numpy(), logprobs.numpy()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_and_logprobs_are_those_of_the_softmax_at_the_temperature(temperature: float) -> None:
    ids, logprobs = _draw(N, temperature=temperature)
    expected = torch.softmax(LOGITS / temperature, dim=0).numpy()
    frequency = np.bincount(ids, minlength=len(LOGITS)) / N
    assert np.abs(frequency - expected).max() < 4 * math.sqrt(0.25 / N)
    np.testing.assert_allclose(logprobs, np.log(expected)[ids], atol=1e-6)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.3}, [0, 1]),
        ({"top_k": 3, "top_p": 0.7}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 50}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_truncation_keeps_the_likeliest_and_the_logprob_is_of_what_is_left(
    cut: dict[str, float], kept: list[int]
) -> None:
    # Softmax of LOGITS: .577 .212 .129 .078 .029 .001; of its first three alone: .629 .231 .140.
    ids, logprobs = _draw(N, **cut)  # type: ignore[arg-type]
    assert sorted(set(ids.tolist())) == kept
    left = torch.log_softmax(LOGITS[kept], dim=0).numpy()
    np.testing.assert_allclose(logprobs, left[ids], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_token_with_its_untempered_logprob() -> None:
    ids, logprobs = _draw(3, temperature=0.0, top_p=0.1, top_k=1)
    assert ids.tolist() == [0, 0, 0]
    np.testing.assert_allclose(logprobs, torch.log_softmax(LOGITS, dim=0)[0].item(), atol=1e-6)


def test_rows_of_one_batch_are_drawn_each_in_its_own_way() -> None:
    draw = Draw(
        temperature=np.array([0.0, 2.0, 1.0], dtype=np.float32),
        top_p=np.array([1.0, 1.0, 1.0], dtype=np.float32),
        top_k=np.array([0, 0, 1], dtype=np.int64),
        min_p=np.zeros(3, dtype=np.float32),
    )
    ids, logprobs = sample(LOGITS.expand(3, -1).clone(), draw, np.array([0.99, 0.9999, 0.99]))
    assert ids.tolist() == [0, 5, 0]
    expected = [
        torch.log_softmax(LOGITS, dim=0)[0].item(),
        torch.log_softmax(LOGITS / 2, dim=0)[5].item(),
        0.0,
    ]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1).clone()
    ones = np.ones(2, dtype=np.float32)
    draw = Draw(temperature=ones, top_p=ones, top_k=np.zeros(2, dtype=np.int64), min_p=np.zeros(2, dtype=np.float32))
    ids, _ = sample(logits, draw, np.array([0.0, 1 - 2.0**-52]))
    assert ids.tolist() == [1, 1]


def test_uniforms_depend_on_key_and_position_only() -> None:
    keys = np.array([stream_key(seed) for seed in (0, 1, 2)], dtype=np.uint64)
    together = uniforms(keys, np.array([4, 9, 0]))
    for i, position in enumerate((4, 9, 0)):
        assert uniforms(keys[i : i + 1], np.array([position]))[0] == together[i]
    many = uniforms(np.full(N, keys[1]), np.arange(N))
    assert abs(many.mean() - 0.5) < 0.01
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    neighbour = uniforms(np.full(N, keys[2]), np.arange(N))
    assert abs(np.corrcoef(many, neighbour)[0, 1]) < 0.03


def test_a_stream_key_takes_any_integer() -> None:
    assert len({stream_key(seed) for seed in (-1, 0, 1, 2**63, 2**64 + 5)}) == 5
