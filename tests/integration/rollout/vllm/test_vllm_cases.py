"""Cases of lost, refused and unsound work with vLLM in a real rollout, over a log and up to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from laminar.operators.prompts.config import SamplingConfig
from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.trainer.config import AlgorithmConfig
from laminar.schemas import records as r
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import Policy
from tests.integration.rollout.vllm.vllm_crew import LEASE_S, Lent, VllmCrew

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

Start = Callable[..., "VllmEngine"]
Make = Callable[..., VllmCrew]

GREEDY = SamplingConfig(max_tokens=48, temperature=0.0)
WORDS = ["abcab", "zyx", "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", "mnopqr", "hij", "kl"]


@pytest.fixture(scope="module")
def other(start: Start) -> VllmEngine:
    """A second engine beside the shared one."""
    return start()


@pytest.fixture
def crew(policy: Policy, shared: VllmEngine, tmp_path: Path) -> Iterator[Make]:
    """Makes one crew with the shared engine, under one model for all versions."""
    made: list[VllmCrew] = []

    def make(**how: Any) -> VllmCrew:
        settings: dict[str, Any] = {
            "engines": {"rollout-0": Lent(shared)}, "weights": lambda version: policy.weights(0), "prompts": WORDS,
            "steps": 1, "groups_per_step": 3, "group_size": 2, "epochs": 1, **how,
        }  # fmt: skip
        made.append(VllmCrew(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _balanced(crew: VllmCrew) -> None:
    ledger = crew.ledger()
    assert ledger.balanced, ledger
    assert not ledger.in_flight, ledger


def _alone(engine: VllmEngine, prompt: r.Prompt) -> bytes:
    """The same request, uninterrupted, in an engine with nothing else in hand."""
    ids = tuple(np.frombuffer(prompt.prompt_tokens, dtype="<i4").tolist())
    engine.submit(EngineRequest(trajectory_id="alone", prompt_ids=ids, sampling=prompt.sampling, seed=1))
    drive = Drive(engine)
    drive.until_finished(["alone"])
    return drive.tokens("alone").ids


def test_a4_a_prompt_above_max_model_len_is_a_dead_letter_and_others_fill_the_batch(crew: Make) -> None:
    run = crew(prompts=["a" * 300, *WORDS])
    run.go(run.ended)
    letters = run.letters()
    assert len({name for letter in letters for name in letter.trajectory_ids}) == len(letters) == 2
    assert {letter.kind for letter in letters} == {"InvalidRequest"}
    assert all("300 prompt tokens" in letter.error and "max_model_len is 256" in letter.error for letter in letters)
    assert all("\n" not in letter.error and letter.attempt <= 3 for letter in letters)
    fates = run.fates()
    assert sum(fate == "trained" for fate in fates.values()) == 6
    _balanced(run)


def test_a5_groups_of_a_rollout_that_never_answers_are_resumed_from_their_deltas_by_another(
    crew: Make, other: VllmEngine, shared: VllmEngine
) -> None:
    run = crew(sampling=GREEDY, rollout={"delta_tokens": 8}, prompts=WORDS[:3])

    def silent() -> bool:
        return len({d.trajectory_id for d in run.read("trajectories.partial", r.TrajectoryTokens)}) == 6

    run.go(silent)
    assert not run.trajectories()
    run._engines = {**run._engines, "rollout-1": Lent(other)}
    stopped = run.running.pop("rollout-0")  # stopped without a word: it neither answers nor closes
    run.start("rollout-1")
    run.go(run.ended, seconds=20 * LEASE_S)
    stopped.close()
    done = run.trajectories()
    assert set(run.fates().values()) == {"trained"}
    assert len(done) == 6
    moved = {m.trajectory_id: m for m in run.read("trajectories.partial", r.TrajectoryMoved)}
    assert moved.keys() == done.keys()
    kept = {
        name: sum(d.tokens.n_tokens for d in run.read("trajectories.partial", r.TrajectoryTokens)
                  if d.trajectory_id == name and d.attempt == 0)
        for name in done
    }  # fmt: skip
    assert all(0 < n < 48 for n in kept.values()), kept
    for name, one in done.items():
        assert (one.rollout_id, one.attempt) == ("rollout-1", 2), name
        assert one.response.ids == _alone(shared, one.prompt), name
    _balanced(run)


@contextmanager
def _spoilt(engine: VllmEngine, spoil: Callable[[Any], Any]) -> Iterator[None]:
    """The running model's logits, as its sampler gets them, are what ``spoil`` makes of them."""

    def begin(worker: Any) -> None:
        model = worker.model_runner.get_model()
        real = model.compute_logits
        model.compute_logits = lambda *args, **how: spoil(real(*args, **how))

    def end(worker: Any) -> None:
        del worker.model_runner.get_model().compute_logits

    engine._vllm.collective_rpc(begin)
    try:
        yield
    finally:
        engine._vllm.collective_rpc(end)


def _infinite(logits: Any) -> Any:
    logits[:, 7] = float("inf")
    return logits


SPOILT: dict[str, Callable[[Any], Any]] = {"nan": lambda logits: logits * float("nan"), "infinite": _infinite}


def _sound(run: VllmCrew) -> None:
    """Every token on any topic has a finite logprob of at most 0, and a version."""
    deltas = [one.tokens for one in run.read("trajectories.partial", r.TrajectoryTokens)]
    whole = [one.response for one in run.trajectories().values()]
    assert deltas
    for tokens in deltas + whole:
        tokens.check("log")
        assert np.isfinite(tokens.logprobs_T).all()
        assert (tokens.logprobs_T <= 0).all()
        assert (tokens.versions_T >= 0).all()


@pytest.mark.parametrize("how", SPOILT)
def test_d1_a_model_that_gives_no_numbers_for_a_while_is_resumed_from_the_last_sound_token(
    crew: Make, shared: VllmEngine, how: str
) -> None:
    run = crew(sampling=GREEDY, prompts=WORDS[:3], rollout={"delta_tokens": 8})
    run.go(lambda: bool(run.read("trajectories.partial", r.TrajectoryTokens)))
    left = 1

    def once(logits: Any) -> Any:
        nonlocal left
        left -= 1
        return SPOILT[how](logits) if left >= 0 else logits

    with _spoilt(shared, once):
        run.go(run.ended)
    assert left < 0
    _sound(run)
    assert not run.letters()
    assert set(run.fates().values()) == {"trained"}
    for name, one in run.trajectories().items():
        assert one.response.ids == _alone(shared, one.prompt), name
    _balanced(run)


@pytest.mark.parametrize("how", SPOILT)
def test_d1_a_model_that_gives_no_numbers_any_more_ends_in_dead_letters_and_nothing_unsound_is_written(
    crew: Make, shared: VllmEngine, how: str
) -> None:
    run = crew(sampling=GREEDY, prompts=WORDS[:3], rollout={"delta_tokens": 8})
    run.go(lambda: bool(run.read("trajectories.partial", r.TrajectoryTokens)))
    with _spoilt(shared, SPOILT[how]):
        run.go(lambda: len(run.letters()) == 6)
    _sound(run)
    assert not run.trajectories()
    for letter in run.letters():
        assert (letter.kind, letter.attempt) == ("EngineError", 3)
        assert "logprob" in letter.error
        assert "\n" not in letter.error
    _balanced(run)


def _positive(delta: Delta) -> Delta:
    logprobs = np.full(delta.tokens.n_tokens, 0.25, dtype="<f4")
    return replace(delta, tokens=replace(delta.tokens, logprobs=logprobs.tobytes()))


def _no_version(delta: Delta) -> Delta:
    versions = np.full(delta.tokens.n_tokens, -1, dtype="<i4")
    return replace(delta, tokens=replace(delta.tokens, versions=versions.tobytes()))


def _too_few_versions(delta: Delta) -> Delta:
    return replace(delta, tokens=replace(delta.tokens, versions=delta.tokens.versions[:-4]))


@pytest.mark.parametrize(
    ("change", "says"), [(_positive, "logprobs"), (_no_version, "versions"), (_too_few_versions, "versions")]
)
def test_c6_d1_what_an_engine_says_without_a_version_or_above_0_is_refused_before_the_log(
    crew: Make, shared: VllmEngine, change: Callable[[Delta], Delta], says: str
) -> None:
    lent = Lent(shared)
    run = crew(engines={"rollout-0": lent}, sampling=GREEDY, prompts=WORDS[:3], rollout={"delta_tokens": 8})
    run.go(lambda: bool(run.read("trajectories.partial", r.TrajectoryTokens)))
    lent.change = change
    run.go(lambda: len(run.letters()) == 6)
    _sound(run)
    assert not run.trajectories()
    assert all(says in letter.error and letter.attempt == 3 for letter in run.letters()), run.letters()[0]
    _balanced(run)


def test_e4_f7_how_a_response_was_sampled_and_why_it_ended_is_recorded_and_the_trainer_warns(
    crew: Make, caplog: pytest.LogCaptureFixture
) -> None:
    how = SamplingConfig(max_tokens=12, temperature=0.9, top_p=0.8, top_k=8, min_p=0.02, stop=("ab", "q"),
                         stop_token_ids=(9, 11))  # fmt: skip
    run = crew(sampling=how, group_size=8)
    with caplog.at_level("WARNING"):
        run.go(run.ended)
    done = run.trajectories().values()
    assert {one.finish for one in done} == {"stop", "length"}
    for one in done:
        recorded, ids = one.prompt.sampling, one.response.ids_T.tolist()
        assert (recorded.top_p, recorded.top_k, recorded.min_p, recorded.temperature) == (0.8, 8, 0.02, 0.9)
        assert (recorded.stop, recorded.stop_token_ids) == (("ab", "q"), (9, 11))
        assert one.logprobs_mode == "processed"
        stopped = ids[-1] in (9, 11) or one.text.endswith(("ab", "q"))
        assert one.finish == ("stop" if stopped else "length")
        assert len(ids) == 12 or stopped
        assert not {9, 11} & set(ids[:-1])
        assert "q" not in one.text[:-1]
        assert (one.response.logprobs_T >= np.log(0.02 / 8)).all()
    said = [entry.getMessage() for entry in caplog.records if "top_p 0.8, top_k 8, min_p 0.02" in entry.getMessage()]
    assert len(said) == 1
    _balanced(run)


@pytest.mark.parametrize("policy_of", ["keep", "mask", "drop"])
def test_f7_what_ran_into_its_limit_is_kept_masked_or_dropped_and_more_than_half_of_a_step_is_a_warning(
    crew: Make, caplog: pytest.LogCaptureFixture, policy_of: Any
) -> None:
    how = SamplingConfig(max_tokens=6, stop_token_ids=(5,))
    algorithm = AlgorithmConfig(truncated=policy_of, zero_advantage="keep", min_group=1)
    run = crew(sampling=how, group_size=8, algorithm=algorithm)
    with caplog.at_level("WARNING"):
        run.go(run.ended)
    done, fates = run.trajectories(), run.fates()
    cut = {name for name, one in done.items() if one.finish == "length"} & fates.keys()
    assert 12 < len(cut) < 24, "more than half of the step, but not all of it"
    assert all(done[name].response.n_tokens == 6 for name in cut)
    assert {fates[name] for name in cut} == {"trained" if policy_of == "keep" else "truncated"}
    assert {fates[name] for name in fates.keys() - cut} == {"trained"}
    (batch,) = run.learner.batches
    trained = {sample.trajectory.trajectory_id for sample in batch.samples}
    assert trained == {name for name, fate in fates.items() if fate == "trained"}
    counted = trained | cut if policy_of == "mask" else trained
    assert batch.denominator == sum(done[name].response.n_tokens for name in counted)
    part = len(cut) / 24
    assert any(f"truncated_fraction is {part:.2f} (limit 0.5)" in entry.getMessage() for entry in caplog.records)
    _balanced(run)
