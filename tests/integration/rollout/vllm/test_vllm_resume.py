"""Interrupted, resumed, preempted and stopped: no token is lost, repeated or other than it would have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from laminar.operators.rollout.engine import EngineRequest
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import EMPTY, Tokens
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import ARGS, BLOCK, VOCAB, Policy, changed

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine


def _request(name: str, prompt: list[int], *, sampled: Tokens = EMPTY, **how: Any) -> EngineRequest:
    sampling = Sampling(**{"max_tokens": 80, "temperature": 0.0, **how})
    return EngineRequest(trajectory_id=name, prompt_ids=tuple(prompt), sampled=sampled, sampling=sampling, seed=5)


def _alone(engine: VllmEngine, request: EngineRequest) -> tuple[Tokens, str]:
    engine.submit(request)
    drive = Drive(engine)
    drive.until_finished([request.trajectory_id])
    return drive.tokens(request.trajectory_id), drive.finish[request.trajectory_id]


def _prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(4, VOCAB, int(size)).tolist() for size in rng.integers(3, 90, n)]


def test_d14_a_greedy_response_interrupted_at_random_points_and_resumed_anywhere_is_the_same(
    engine: VllmEngine, start: Callable[..., VllmEngine], policy: Policy
) -> None:
    other = start(args={**ARGS, "async_scheduling": True})
    other.load(policy.weights(0), 0)
    prompts = {f"t/{i}": prompt for i, prompt in enumerate(_prompts(6))}
    whole = {name: _alone(engine, _request(name, prompt))[0] for name, prompt in prompts.items()}
    rng = np.random.default_rng(1)
    for name, prompt in prompts.items():
        so_far = EMPTY
        while so_far.n_tokens < 80:
            here = engine if rng.random() < 0.5 else other
            here.submit(_request(name, prompt, sampled=so_far))
            drive = Drive(here)
            drive.until_tokens(name, int(rng.integers(1, 40)))
            rest = here.abort(name)
            if rest is not None:
                drive.take(rest)
            so_far = Tokens.concat([so_far, drive.tokens(name)])
        assert so_far.ids == whole[name].ids
        assert np.abs(so_far.logprobs_T - whole[name].logprobs_T).max() < 1e-5


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_under_a_small_cache_is_counted_and_changes_no_token(
    engine: VllmEngine, start: Callable[..., VllmEngine], policy: Policy, ahead: bool
) -> None:
    tight = start(kv_total=160, max_model_len=160, args={**ARGS, "async_scheduling": ahead})
    tight.load(policy.weights(0), 0)
    assert (tight.limits.kv_total, tight.stats().preempted) == (160, 0)
    prompts = {f"t/{i}": prompt[:20] for i, prompt in enumerate(_prompts(5))}
    for name, prompt in prompts.items():
        tight.submit(_request(name, prompt))
    drive = Drive(tight)
    drive.until_finished(prompts)
    assert tight.stats().preempted > 0
    assert drive.most_kv <= 160
    for name, prompt in prompts.items():
        expected, _ = _alone(engine, _request(name, prompt))
        assert drive.tokens(name).ids == expected.ids
        assert np.abs(drive.tokens(name).logprobs_T - expected.logprobs_T).max() < 1e-4


def test_status_counts_a_prompt_that_several_share_once_and_knows_no_cache_of_old_weights(
    engine: VllmEngine, policy: Policy
) -> None:
    prompt = _prompts(1)[0][:3] * 32
    for i in range(10):
        engine.submit(_request(f"t/{i}", prompt, max_tokens=40, temperature=1.0))
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_used) == (0, 10, 0)
    drive = Drive(engine)
    drive.until_tokens("t/7", 3)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (8, 2)
    ends = sum(drive.tokens(f"t/{i}").n_tokens for i in range(8))
    assert len(prompt) + ends - 8 <= stats.kv_used <= len(prompt) + 8 * 2 * BLOCK
    assert stats.kv_used < 8 * len(prompt)
    engine.load(policy.weights(1), 1)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 10, 0)
    drive.poll()
    assert engine.stats().running == 8
    assert engine.stats().kv_used >= len(prompt)
    drive.until_finished(f"t/{i}" for i in range(10))
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_used) == (0, 0, 0)
    assert all(drive.tokens(f"t/{i}").n_tokens == 40 for i in range(10))


def test_new_weights_are_no_preemption(engine: VllmEngine, policy: Policy) -> None:
    before = engine.stats().preempted
    engine.submit(_request("t", [4, 5, 6]))
    drive = Drive(engine)
    drive.until_tokens("t", 3)
    engine.load(policy.weights(1), 1)
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_used) == (0, 1, 0)
    drive.until_finished(["t"])
    assert engine.stats().preempted == before


def test_a_stop_string_ends_a_response_also_when_it_began_before_a_resume(engine: VllmEngine) -> None:
    prompt = _prompts(3)[2]
    whole, _ = _alone(engine, _request("t", prompt, temperature=1.0))
    text = engine.decode(tuple(whole.ids_T.tolist()))
    assert len(text) > 30
    stop = text[20:24]
    end = text.index(stop) + len(stop)
    cut, finish = _alone(engine, _request("t", prompt, temperature=1.0, stop=("never", stop)))
    assert engine.decode(tuple(cut.ids_T.tolist())) == text[:end]
    assert (cut.ids, finish) == (whole[: cut.n_tokens].ids, "stop")
    tail, finish = _alone(
        engine, _request("t", prompt, stop=(text[end - 3 : end] + _next(engine, prompt, cut),), sampled=cut)
    )
    assert (tail.n_tokens, finish) == (1, "stop")


def _next(engine: VllmEngine, prompt: list[int], so_far: Tokens) -> str:
    """The text of the greedy token after these."""
    one, _ = _alone(engine, _request("next", prompt, sampled=so_far, max_tokens=so_far.n_tokens + 1))
    return engine.decode(tuple(one.ids_T.tolist()))


def test_f7_a_whole_response_that_comes_back_ends_at_once_with_its_reason(engine: VllmEngine) -> None:
    whole, finish = _alone(engine, _request("t", [4, 5, 6], max_tokens=5))
    assert finish == "length"
    assert _alone(engine, _request("t", [4, 5, 6], max_tokens=5, sampled=whole)) == (EMPTY, "length")
    last = int(whole.ids_T[-1])
    again = _request("t", [4, 5, 6], sampled=whole, stop_token_ids=(last,))
    assert _alone(engine, again) == (EMPTY, "stop")


def test_the_end_tokens_of_the_folder_end_a_response(start: Callable[..., VllmEngine], policy: Policy) -> None:
    plain = start(eos_token_ids=None)
    plain.load(policy.weights(0), 0)
    for i in range(8):
        plain.submit(_request(f"t/{i}", [4, 5, 6 + i], temperature=2.0, max_tokens=200))
    drive = Drive(plain)
    drive.until_finished(f"t/{i}" for i in range(8))
    ended = [drive.tokens(f"t/{i}") for i in range(8) if drive.finish[f"t/{i}"] == "stop"]
    assert ended
    assert all(tokens.ids_T[-1] == 2 and 2 not in tokens.ids_T[:-1] for tokens in ended)


def test_resuming_a_sampled_response_draws_on_instead_of_repeating(engine: VllmEngine, policy: Policy) -> None:
    """The generator's seed follows the tokens so far: the same one again would repeat the first draws."""
    weights = policy.weights(0)
    for name, view in weights.items():  # every token is as likely as any other, whatever came before
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights = changed(weights, name, np.zeros(view.shape))
    weights = changed(weights, "model.embed_tokens.weight", np.ones(weights["model.embed_tokens.weight"].shape))
    engine.load(weights, 1)
    whole, _ = _alone(engine, _request("t", [4, 5, 6], temperature=1.0))
    tail, _ = _alone(engine, _request("t", [4, 5, 6], temperature=1.0, sampled=whole[:40]))
    assert (tail.ids_T == whole[:40].ids_T).mean() < 0.5
    again, _ = _alone(engine, _request("t", [4, 5, 6], temperature=1.0, sampled=whole[:40]))
    assert again.ids == tail.ids


def test_tokens_of_a_request_wait_for_each_other_but_its_first_and_last_do_not(
    start: Callable[..., VllmEngine], policy: Policy
) -> None:
    patient = start(gather_s=3600.0)
    patient.load(policy.weights(0), 0)
    names = [f"t/{i}" for i in range(4)]
    for name in names[:3]:
        patient.submit(_request(name, [5, 6, 7], max_tokens=200))
    patient.submit(_request(names[3], [5, 6, 7], max_tokens=60))
    drive = Drive(patient)
    n_deltas = dict.fromkeys(names, 0)
    while names[3] not in drive.finish:
        deltas = patient.poll(0.0)
        assert len(deltas) in (1, 3, 4), "all of the first tokens, then of one request at a time, and what ends"
        for delta in deltas:
            drive.take(delta)
            n_deltas[delta.trajectory_id] += 1
    assert drive.tokens(names[3]).n_tokens == 60, "everything that was kept comes with the last token"
    assert min(n_deltas.values()) >= 2, "nobody is passed over"
    for name in names[:3]:
        rest = patient.abort(name)
        assert rest is not None
        drive.take(rest)
        assert drive.tokens(name).n_tokens >= 59, "and with an abort"
