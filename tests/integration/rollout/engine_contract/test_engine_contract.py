"""What every engine does, whatever it samples with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.schemas.errors import InvalidRequest, WeightsMismatch
from laminar.schemas.tokens import Tokens
from tests.integration.rollout.engine_contract.subject import Drive, Subject, request, response_of

Make = Callable[..., Subject]


def test_each_token_comes_once_and_in_order_from_a_full_batch(make: Make) -> None:
    subject = make()
    alone = {
        f"t/{i}": response_of(subject.engine, request(f"alone/{i}", prompt)) for i, prompt in enumerate(subject.prompts)
    }
    for i, prompt in enumerate(subject.prompts):
        subject.engine.submit(request(f"t/{i}", prompt))
    drive = Drive(subject.engine)
    drive.until_finished(alone)
    for name, (tokens, finish) in alone.items():
        assert drive.tokens(name).ids == tokens.ids
        assert drive.finish[name] == finish
    assert subject.engine.poll(0.0) == []


def test_more_requests_than_the_batch_limit_wait_and_all_finish(make: Make) -> None:
    subject = make(max_running=2)
    for i, prompt in enumerate(subject.prompts):
        subject.engine.submit(request(f"t/{i}", prompt))
    stats = subject.engine.stats()
    assert stats.running + stats.waiting == len(subject.prompts)
    drive = Drive(subject.engine)
    drive.until_finished(f"t/{i}" for i in range(len(subject.prompts)))
    assert drive.most_running == 2


def test_a_small_kv_cache_delays_requests_but_changes_no_token(make: Make) -> None:
    roomy, tight = make(), make(kv_total=48)
    for i, prompt in enumerate(tight.prompts):
        tight.engine.submit(request(f"t/{i}", prompt))
    drive = Drive(tight.engine)
    drive.until_finished(f"t/{i}" for i in range(len(tight.prompts)))
    assert drive.most_kv <= 48
    for i, prompt in enumerate(roomy.prompts):
        expected, _ = response_of(roomy.engine, request(f"t/{i}", prompt))
        assert drive.tokens(f"t/{i}").ids == expected.ids


def test_stats_count_tokens_while_sampling_and_are_zero_when_idle(make: Make) -> None:
    subject = make()
    assert subject.engine.stats().kv_total == subject.engine.limits.kv_total == 256
    subject.engine.submit(request("t/0", subject.prompts[0]))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 2)
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting) == (1, 0)
    sampled = drive.tokens("t/0").n_tokens
    # The last sampled token need not be in the cache yet, and the engine may be a little ahead of the poll.
    assert len(subject.prompts[0]) + sampled - 1 <= stats.kv_used <= len(subject.prompts[0]) + 24
    drive.until_finished(["t/0"])
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


def test_abort_returns_the_unpolled_rest_and_forgets_the_request(make: Make) -> None:
    subject = make()
    expected, _ = response_of(subject.engine, request("alone", subject.prompts[1]))
    subject.engine.submit(request("t/0", subject.prompts[1]))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 5)
    rest = subject.engine.abort("t/0")
    assert rest is not None
    drive.take(rest)
    got = drive.tokens("t/0")
    assert 5 <= got.n_tokens < expected.n_tokens
    assert got.ids == expected[: got.n_tokens].ids
    assert subject.engine.abort("t/0") is None
    assert subject.engine.poll(0.0) == []
    assert subject.engine.stats().kv_used == 0


def test_abort_of_a_waiting_or_unknown_request(make: Make) -> None:
    subject = make(max_running=1)
    subject.engine.submit(request("t/0", subject.prompts[0]))
    subject.engine.submit(request("t/1", subject.prompts[1]))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 1)
    rest = subject.engine.abort("t/1")
    assert rest is not None
    assert rest.tokens.n_tokens == 0
    assert rest.finish is None
    assert subject.engine.abort("nobody") is None
    drive.until_finished(["t/0"])
    assert "t/1" not in drive.parts


def test_abort_of_one_of_several_changes_no_token_of_the_others(make: Make) -> None:
    subject, other = make(), make()
    expected = [response_of(other.engine, request(f"t/{i}", subject.prompts[i]))[0] for i in range(3)]
    for i in range(3):
        subject.engine.submit(request(f"t/{i}", subject.prompts[i]))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 5)
    assert subject.engine.abort("t/0") is not None
    drive.until_finished(["t/1", "t/2"])
    assert [drive.tokens(f"t/{i}").ids for i in (1, 2)] == [tokens.ids for tokens in expected[1:]]


def test_an_aborted_trajectory_may_come_back(make: Make) -> None:
    subject = make()
    expected, _ = response_of(subject.engine, request("alone", subject.prompts[2]))
    subject.engine.submit(request("t/0", subject.prompts[2]))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 3)
    rest = subject.engine.abort("t/0")
    assert rest is not None
    drive.take(rest)
    so_far = drive.tokens("t/0")
    tail, _ = response_of(subject.engine, request("t/0", subject.prompts[2], sampled=so_far))
    assert Tokens.concat([so_far, tail]).ids == expected.ids


@pytest.mark.parametrize("cut", [1, 7, 23])
def test_a_greedy_resume_continues_exactly(make: Make, cut: int) -> None:
    first, second = make(), make()
    expected, finish = response_of(first.engine, request("t/0", first.prompts[3]))
    resumed = request("t/0", first.prompts[3], sampled=expected[:cut])
    tail, tail_finish = response_of(second.engine, resumed)
    assert tail.ids == expected[cut:].ids
    assert tail_finish == finish


def test_a_sampled_request_is_reproducible_from_its_seed_and_its_tokens(make: Make) -> None:
    first, second = make(), make()
    what = request("t/0", first.prompts[0], temperature=1.0, seed=11)
    one, _ = response_of(first.engine, what)
    second.engine.submit(request("other", second.prompts[4], temperature=1.0, seed=5))
    second.engine.submit(what)
    drive = Drive(second.engine)
    drive.until_finished(["t/0", "other"])
    assert one.ids == drive.tokens("t/0").ids
    resumed = request("t/0", first.prompts[0], temperature=1.0, seed=11, sampled=one[:9])
    assert response_of(first.engine, resumed)[0].ids == response_of(second.engine, resumed)[0].ids


def test_different_seeds_give_different_samples(make: Make) -> None:
    subject = make()
    drawn = {
        response_of(subject.engine, request("t/0", subject.prompts[0], temperature=1.0, seed=seed))[0].ids
        for seed in range(6)
    }
    assert len(drawn) > 1


def test_max_tokens_counts_the_whole_response(make: Make) -> None:
    subject = make()
    whole, finish = response_of(subject.engine, request("t/0", subject.prompts[0], max_tokens=10))
    assert (whole.n_tokens, finish) == (10, "length")
    tail, finish = response_of(subject.engine, request("t/0", subject.prompts[0], max_tokens=10, sampled=whole[:7]))
    assert (tail.n_tokens, finish) == (3, "length")


def test_a_stop_token_ends_the_response_and_is_part_of_it(make: Make) -> None:
    subject = make()
    whole, _ = response_of(subject.engine, request("t/0", subject.prompts[0]))
    stop = int(whole.ids_T[4])
    first = whole.ids_T.tolist().index(stop)
    what = request("t/0", subject.prompts[0], stop_token_ids=(stop,))
    cut, finish = response_of(subject.engine, what)
    assert cut.ids == whole[: first + 1].ids
    assert finish == "stop"


def test_the_models_limit_ends_the_response(make: Make) -> None:
    subject = make(max_model_len=16)
    prompt = subject.prompts[0]
    whole, finish = response_of(subject.engine, request("t/0", prompt))
    assert (whole.n_tokens, finish) == (16 - len(prompt), "length")


def test_a_prompt_without_room_for_a_token_is_refused_naming_the_limit(make: Make) -> None:
    subject = make(max_model_len=16)
    with pytest.raises(InvalidRequest, match="16"):
        subject.engine.submit(request("t/0", subject.prompts[0] * 6))
    whole, _ = response_of(subject.engine, request("t/1", subject.prompts[0], max_tokens=2))
    assert whole.n_tokens == 2


def test_c4_tokens_carry_the_version_that_sampled_them_when_a_load_comes_between_polls(make: Make) -> None:
    subject = make()
    for i, prompt in enumerate(subject.prompts[:3]):
        subject.engine.submit(request(f"t/{i}", prompt))
    drive = Drive(subject.engine)
    drive.until_tokens("t/0", 4)
    before = {f"t/{i}": drive.tokens(f"t/{i}").n_tokens for i in range(3)}
    subject.engine.load(subject.weights(5), 5)
    assert subject.engine.version == 5
    drive.until_finished(before)
    for name, n_before in before.items():
        versions = drive.tokens(name).versions_T.tolist()
        assert set(versions[:n_before]) <= {0}
        assert versions == sorted(versions)
        assert versions[-1] == 5
        assert set(versions) <= {0, 5}


def test_wrong_weights_are_refused_before_anything_changes(make: Make) -> None:
    subject = make()
    expected, _ = response_of(subject.engine, request("t/0", subject.prompts[0]))
    with pytest.raises(WeightsMismatch):
        subject.engine.load(subject.wrong_weights, subject.wrong_version)
    assert subject.engine.version == 0
    after, _ = response_of(subject.engine, request("t/0", subject.prompts[0]))
    assert after == expected


def test_an_idle_poll_returns_nothing(make: Make) -> None:
    assert make().engine.poll(0.0) == []


def test_decode_gives_text(make: Make) -> None:
    subject = make()
    whole, _ = response_of(subject.engine, request("t/0", subject.prompts[0]))
    text = subject.engine.decode(tuple(whole.ids_T.tolist()))
    assert isinstance(text, str)
    assert text
    assert subject.engine.decode(()) == ""
