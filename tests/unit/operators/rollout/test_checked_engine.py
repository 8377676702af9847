"""What becomes of an engine whose logprobs are not the trainer's: with scripted engines, under a virtual clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from laminar.operators.measure import Measures
from laminar.operators.rollout.checked_engine import CheckedEngine
from laminar.operators.rollout.config import RolloutConfig, SelfCheckConfig
from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine
from laminar.operators.rollout.event import POOL
from laminar.operators.rollout.loader import Loader
from laminar.operators.rollout.self_check import RESERVED, TEMPERATURE, questions
from laminar.schemas import records as r
from laminar.schemas.errors import EngineLost, Unavailable
from laminar.schemas.tokens import ids_buffer
from tests.unit.operators.rollout.stage import RelayStandIn, Stage, ten

LOGPROBS = np.log(np.asarray([[0.5, 0.25, 0.125, 0.0625], [0.4, 0.3, 0.2, 0.05]]))
PROBE = r.Probe(
    tokens=ids_buffer(range(10, 30)),
    lengths=ids_buffer([5, 20]),
    top_k=4,
    ids=ids_buffer([7, 8, 9, 6, 5, 6, 7, 8]),
    logprobs=LOGPROBS.astype("<f4").tobytes(),
    dtype="float32",
)


def manifest(version: int, *, probes: tuple[r.Probe, ...] = (PROBE,)) -> r.VersionManifest:
    return r.VersionManifest(
        run_id="run", epoch=1, version=version, parent=version - 1, step=version, state="committed", tensors=(),
        total_bytes=0, chunk_bytes=4096, chunk_digests=b"", root_digest="", relay_id="relay-0", relay_url="",
        relay_boot="boot", at_ms=0, probes=probes,
    )  # fmt: skip


def right(request: EngineRequest) -> Answer:
    """What an engine that agrees with the trainer samples: of two likeliest tokens the first."""
    row = {5: 0, 20: 1}[len(request.prompt_ids)]
    logprobs = LOGPROBS[row]
    if request.sampling.temperature:
        assert (request.sampling.temperature, request.sampling.top_k) == (TEMPERATURE, 2)
        logprobs = logprobs / TEMPERATURE
        logprobs = logprobs - np.log(np.exp(logprobs[:2]).sum())
    return Answer(ids=(int(PROBE.ids_PK[row, 0]),), logprobs=float(logprobs[0]))


def raw(request: EngineRequest) -> Answer:
    """Logprobs of temperature 1 and the whole vocabulary, whatever was asked."""
    row = {5: 0, 20: 1}[len(request.prompt_ids)]
    return Answer(ids=(int(PROBE.ids_PK[row, 0]),), logprobs=float(LOGPROBS[row, 0]))


def off_by(nats: float) -> Callable[[EngineRequest], Answer]:
    """As right, but for one of the four answers."""

    def answer(request: EngineRequest) -> Answer:
        told = right(request)
        if len(request.prompt_ids) == 20 and not request.sampling.temperature:
            return Answer(ids=told.ids, logprobs=told.logprobs - nats)  # type: ignore[operator]
        return told

    return answer


class Case:
    """A checked engine over a scripted one, and a loader for it."""

    def __init__(self, *, anew: bool = False, **config: Any) -> None:
        self.answer: Callable[[EngineRequest], Answer] = right
        self.now = 0.0
        self.measures = Measures()
        self.lost: list[str] = []

        def script(request: EngineRequest) -> Answer:
            return self.answer(request) if request.trajectory_id.startswith(RESERVED) else ten(20)

        case = self

        class Anew(ScriptedEngine):
            """Starts anew when it is asked to, as one in a process of its own does."""

            def restart(self, why: str) -> None:
                self._version = -1
                self.close()
                case.lost.append(why)
                raise EngineLost(why)

        self.engine = (Anew if anew else ScriptedEngine)(script, max_running=8)
        self.checked = CheckedEngine(
            self.engine, SelfCheckConfig(**config), clock=lambda: self.now, measures=self.measures
        )
        self.relay = RelayStandIn()
        self.loader = Loader(self.checked, self.relay, clock=lambda: self.now, backoff_s=0.2, backoff_max_s=5.0)

    def load(self, version: int, **how: Any) -> bool:
        return self.loader.load(manifest(version, **how), self.now, timeout_s=5.0)

    @property
    def asked(self) -> int:
        return sum(one.trajectory_id.startswith(RESERVED) for one in self.engine.submitted)


def test_d2_a_version_counts_once_the_engines_logprobs_are_the_trainers() -> None:
    case = Case()
    assert case.checked.version == -1
    assert case.load(3)
    assert case.checked.version == 3
    assert case.asked == 4
    assert case.engine.stats().running == case.engine.stats().waiting == 0
    assert case.measures.gauges["rollout_self_check_failures"] == 0
    assert case.measures.gauges["rollout_self_check_difference_nats"] < 1e-6


def test_d2_a_mismatch_gives_the_engine_up_and_says_both_numbers_and_the_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case(anew=True)
    assert case.load(3)
    case.answer = off_by(0.01)
    with pytest.raises(EngineLost):
        case.load(4)
    said = (
        "engine scripted-1: self-check of version 4: probe 0 after 20 tokens, greedy: the engine gives token 5"
        " -0.926291, the trainer -0.916291 (bound 0.0003)"
    )
    assert said in [record.getMessage() for record in caplog.records]
    assert case.lost == [said.removeprefix("engine scripted-1: ")]
    assert case.checked.version == -1
    assert case.measures.gauges["rollout_self_check_failures"] == 1
    assert case.measures.gauges["rollout_self_check_difference_nats"] == pytest.approx(0.01, abs=1e-6)
    case.answer = right
    assert case.load(4)
    assert case.checked.version == 4


def test_d2_many_small_differences_are_found_by_their_mean() -> None:
    case = Case(tolerance=0.1)
    case.answer = off_by(0.09)
    assert not case.load(3)  # 0.0225 in the mean, of which 0.02 are allowed
    case = Case(tolerance=0.1)
    case.answer = off_by(0.07)
    assert case.load(3)


def test_e3_raw_logprobs_under_a_temperature_are_found_whatever_the_run_samples_with() -> None:
    case = Case()
    case.answer = raw
    assert not case.load(3)


def test_d2_a_token_that_the_trainer_does_not_list_must_be_less_likely_than_all_that_it_lists() -> None:
    case = Case()
    case.answer = lambda request: Answer(ids=(99,), logprobs=right(request).logprobs)
    assert not case.load(3)
    assert case.measures.gauges["rollout_self_check_difference_nats"] > 1


def test_d2_the_likeliest_two_may_change_places_only_where_they_are_equal() -> None:
    def second(request: EngineRequest) -> Answer:
        row = {5: 0, 20: 1}[len(request.prompt_ids)]
        if request.sampling.temperature:
            return right(request)
        return Answer(ids=(int(PROBE.ids_PK[row, 1]),), logprobs=float(LOGPROBS[row, 1]))

    case = Case()
    case.answer = second
    assert not case.load(3)
    case = Case(tolerance=1.0)
    case.answer = second
    assert case.load(3)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: Answer(ids=(7,), logprobs=float("nan")),
        lambda request: Answer(ids=(7, 7), fail_times=9, fail_at=0),
        lambda request: Answer(ids=(7,), reject="it cannot"),
    ],
    ids=["nan", "fails", "refuses"],
)
def test_d1_d2_an_engine_without_an_answer_fails(answer: Callable[[EngineRequest], Answer]) -> None:
    case = Case(anew=True)
    case.load(3)
    case.answer = answer
    with pytest.raises(EngineLost):
        case.load(4)


def test_an_engine_that_never_answers_fails_at_its_deadline() -> None:
    case = Case(anew=True, timeout_s=2.0)
    case.load(3)
    case.answer = lambda request: Answer(ids=(7, 7), hang_at=0)
    poll = case.engine.poll

    def slow(timeout_s: float) -> Any:
        case.now += 0.5
        return poll(timeout_s)

    case.engine.poll = slow  # type: ignore[method-assign]
    with pytest.raises(EngineLost, match="no answer within 2 s"):
        case.load(4)


def test_an_engine_that_lives_in_the_process_ends_it_when_it_had_passed_before() -> None:
    case = Case()
    case.load(3)
    case.answer = raw
    with pytest.raises(Unavailable, match=r"self-check of version 4: .*its process has to start anew"):
        case.load(4)
    assert case.checked.version == -1


@pytest.mark.parametrize("anew", [True, False])
def test_d2_one_that_fails_twice_after_a_fresh_start_waits_out_of_service_for_a_newer_version(anew: bool) -> None:
    case = Case(anew=anew)
    case.answer = raw
    if anew:
        with pytest.raises(EngineLost):
            case.load(3)
    else:
        assert not case.load(3)
    assert not case.loader.is_due(3, case.now)
    assert case.loader.is_due(3, case.now + 0.2)
    assert not case.load(3)
    assert case.checked.version == -1
    assert case.checked.out_of_service
    assert not case.loader.is_due(3, case.now + 1000)
    assert not case.loader.is_due(2, case.now + 1000)
    assert not case.loader.is_due(4, case.now + 4)
    assert case.loader.is_due(4, case.now + 5)
    assert case.loader.failing_s(case.now + 7) == 7
    case.now += 5
    assert not case.load(4)  # without a word to the engine: starting it did not help
    assert len(case.lost) == int(anew)
    assert not case.loader.is_due(5, case.now + 9)
    assert case.loader.is_due(5, case.now + 10)
    case.now += 10
    case.answer = right
    assert case.load(5)
    assert case.checked.version == 5
    assert not case.checked.out_of_service
    assert case.loader.failing_s(case.now) == 0


def test_one_out_of_service_asks_again_for_a_newer_version_that_could_not_be_had() -> None:
    case = Case()
    case.answer = raw
    for _ in range(2):
        assert not case.load(3)
    assert case.checked.out_of_service
    case.now += 5
    case.relay.missing.add(4)
    assert not case.load(4)
    case.answer = right
    case.relay.missing.clear()
    assert not case.loader.is_due(4, case.now)
    assert case.loader.is_due(4, case.now + 0.2)
    assert not case.loader.is_due(3, case.now + 1000)
    case.now += 0.2
    assert case.load(4)
    assert case.checked.version == 4


def test_the_first_load_is_always_checked_and_then_every_so_many() -> None:
    case = Case(every=3, anew=True)
    asked = []
    for version in range(1, 8):
        before = case.asked
        case.load(version)
        asked.append(case.asked > before)
    assert asked == [True, False, False, True, False, False, True]
    with pytest.raises(EngineLost):
        case.checked.restart("a test wants it")
    before = case.asked
    case.load(8)
    assert case.asked > before


def test_every_0_checks_nothing() -> None:
    case = Case(every=0)
    case.answer = raw
    assert case.load(3)
    assert case.asked == 0


def test_an_engine_without_a_model_is_not_asked() -> None:
    assert RolloutConfig(engine={"kind": "scripted"}).checks.every == 0
    assert RolloutConfig(engine={"kind": "vllm"}, self_check={"every": 3}).checks.every == 3


def test_a_version_without_probes_is_taken_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    case = Case()
    for version in (1, 2, 3):
        assert case.load(version, probes=())
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["version 1: no self-check, since its trainer sent no probes"]
    assert case.checked.version == 3


def test_probes_that_do_not_fit_into_the_engine_are_left_out() -> None:
    limits = ScriptedEngine(ten, max_model_len=20).limits  # type: ignore[arg-type]
    assert {len(one.request.prompt_ids) for one in questions(manifest(3), limits=limits)} == {5}
    assert {len(one.request.prompt_ids) for one in questions(manifest(3), limits=Case().engine.limits)} == {5, 20}


def _running(case: Case) -> None:
    case.load(3)
    request = EngineRequest(trajectory_id="d/0/0/0", prompt_ids=(1,), sampling=r.Sampling(max_tokens=20), seed=0)
    case.checked.submit(request)
    assert case.checked.poll(0.0)[0].tokens.versions_T.tolist() == [3]


def test_d2_what_is_sampled_beside_the_check_comes_after_it() -> None:
    case = Case()
    _running(case)
    assert case.load(4)
    (delta,) = case.checked.poll(0.0)
    assert delta.trajectory_id == "d/0/0/0"
    assert delta.tokens.versions_T.tolist() == [4]
    assert case.checked.poll(0.0)[0].tokens.n_tokens == 1


def test_d2_an_abort_after_the_check_returns_what_was_held_back() -> None:
    case = Case()
    _running(case)
    assert case.load(4)
    rest = case.checked.abort("d/0/0/0")
    assert rest is not None
    assert rest.tokens.ids_T.tolist() == [101]
    assert case.checked.poll(0.0) == []


def test_d2_what_is_sampled_beside_a_check_that_fails_is_seen_by_nobody() -> None:
    case = Case()
    _running(case)
    case.answer = raw
    with pytest.raises(Unavailable):
        case.load(4)
    assert case.engine.stats().running == 1
    assert case.checked.poll(0.0) == []
    rest = case.checked.abort("d/0/0/0")
    assert rest is not None
    assert rest.tokens.n_tokens == 0


def test_d2_a_full_engine_makes_room_for_the_check_and_goes_on_with_all_it_had(stage: Stage) -> None:
    engine = ScriptedEngine(
        lambda request: right(request) if request.trajectory_id.startswith(RESERVED) else ten(300), max_running=8
    )
    stage.world.write(manifest(1))
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(2, sampling=r.Sampling(max_tokens=1000))
    stage.run(1.0, rollout)
    assert engine.stats().running == 8
    stage.world.write(manifest(2))
    stage.until(lambda: engine.loads == [1, 2], rollout)
    assert engine.stats().running + engine.stats().waiting == 8
    stage.until(lambda: len(stage.completed()) == 8, rollout)
    for one in stage.completed().values():
        assert one.response.ids_T.tolist() == list(range(100, 400))
        assert (one.version_min, one.version_max) == (1, 2)


def test_an_engine_that_is_lost_while_it_makes_room_for_the_check_comes_back(stage: Stage) -> None:
    engine = ScriptedEngine(
        lambda request: right(request) if request.trajectory_id.startswith(RESERVED) else ten(300),
        max_running=8,
        away=5,
    )
    stage.world.write(manifest(1))
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(2, sampling=r.Sampling(max_tokens=1000))
    stage.run(1.0, rollout)
    engine.lose(at="abort")
    stage.world.write(manifest(2))
    stage.until(lambda: engine.loads == [1, 2], rollout)
    assert len(stage.read("trajectories.partial", r.TrajectoryMoved)) == 8
    stage.prompts(1, first=2)
    stage.until(lambda: len(stage.completed()) == 4, rollout)


def test_d2_a_load_that_fails_leaves_all_running_that_made_room_for_the_check(stage: Stage) -> None:
    engine = ScriptedEngine(
        lambda request: right(request) if request.trajectory_id.startswith(RESERVED) else ten(300), max_running=8
    )
    stage.world.write(manifest(1))
    rollout = stage.rollout(engine=engine, updates="in_flight")
    stage.prompts(2, sampling=r.Sampling(max_tokens=1000))
    stage.run(1.0, rollout)
    stage.weights.missing.add(2)
    stage.weights.fetch = lambda newest: newest  # type: ignore[method-assign]
    stage.world.write(manifest(2))
    stage.run(1.0, rollout)
    assert 2 in stage.weights.opened
    assert engine.loads == [1]
    assert engine.stats().running == 8


def test_d2_a_rollout_out_of_service_takes_no_groups_and_says_that_it_holds_no_version(stage: Stage) -> None:
    answers = {"self": raw}
    engine = ScriptedEngine(
        lambda request: answers["self"](request) if request.trajectory_id.startswith(RESERVED) else ten(),
        max_running=8,
    )
    stage.world.write(manifest(1))
    stage.prompts(2)
    rollout = stage.rollout(engine=engine)
    stage.run(20.0, rollout)
    assert engine.loads == [1, 1]
    assert stage.completed() == {}
    assert stage.read("trajectories.partial", r.TrajectoryStarted) == []
    assert (stage.status().version, stage.status().state) == (-1, "starting")
    assert stage.status().at_ms > stage.world.now_ms - 2000
    stage.adopt(rollout, version=1)
    stage.run(1.0, rollout)
    (moved,) = stage.read("trajectories.partial", r.TrajectoryMoved)
    assert (moved.trajectory_id, moved.reason, moved.to_incarnation) == ("d/0/50/0", "handback", POOL)
    answers["self"] = right
    stage.world.write(manifest(2))
    stage.until(lambda: len(stage.completed()) == 8, rollout)
    assert {one.version_min for one in stage.completed().values()} == {2}
