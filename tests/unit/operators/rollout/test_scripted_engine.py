"""What the scripted engine adds to the engine contract: speed, faults, versions in the tokens."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from laminar.operators.rollout.engine import EngineRequest, EngineStats
from laminar.operators.rollout.engines.scripted import EXITED, Answer, ScriptedEngine, always, by_trajectory, seeded
from laminar.schemas.errors import ConfigError, EngineLost, InvalidRequest, Unavailable, WeightsMismatch
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import EMPTY, Tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str = "t", *, sampled: Tokens = EMPTY, max_tokens: int = 100) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens)
    return EngineRequest(trajectory_id=name, prompt_ids=(1, 2), sampled=sampled, sampling=sampling, seed=3)


def engine(script: Answer, version: int = 0, **settings: object) -> ScriptedEngine:
    made = ScriptedEngine(always(script), **settings)  # type: ignore[arg-type]
    made.load({}, version)
    return made


FIVE = Answer(ids=(1, 2, 3, 4, 5))


def test_nothing_is_sampled_before_the_first_load() -> None:
    made = ScriptedEngine(always(FIVE))
    made.submit(request())
    assert made.poll(0.0) == []
    assert made.stats().waiting == 1
    made.load({}, 0)
    assert made.poll(0.0)[0].tokens.n_tokens == 1


def test_speed_follows_the_clock_and_abort_returns_what_came_since_the_last_poll() -> None:
    clock = Clock()
    made = engine(Answer(ids=tuple(range(50))), tokens_per_s=10.0, clock=clock)
    made.submit(request())
    assert made.poll(0.0) == []
    clock.now = 0.35
    [delta] = made.poll(0.0)
    assert delta.tokens.ids_T.tolist() == [0, 1, 2]
    clock.now = 1.0
    rest = made.abort("t")
    assert rest is not None
    assert rest.tokens.ids_T.tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_a_late_request_starts_at_its_own_time() -> None:
    clock = Clock()
    made = engine(Answer(ids=tuple(range(50))), tokens_per_s=10.0, clock=clock, max_running=2)
    made.submit(request("a"))
    clock.now = 2.0
    made.submit(request("b"))
    clock.now = 2.5
    assert {d.trajectory_id: d.tokens.n_tokens for d in made.poll(0.0)} == {"a": 25, "b": 5}


def test_tokens_due_before_a_load_carry_the_old_version() -> None:
    clock = Clock()
    made = engine(Answer(ids=tuple(range(50))), tokens_per_s=10.0, clock=clock, version_ids=True)
    made.submit(request())
    clock.now = 0.3
    made.load({}, 7)
    clock.now = 0.5
    [delta] = made.poll(0.0)
    assert delta.tokens.versions_T.tolist() == delta.tokens.ids_T.tolist() == [0, 0, 0, 7, 7]


def test_scripted_failures_come_as_often_as_asked_for() -> None:
    made = engine(Answer(ids=(1, 2, 3, 4), fail_times=2, fail_at=2), tokens_per_poll=10)
    for _ in range(2):
        made.submit(request())
        [delta] = made.poll(0.0)
        assert (delta.tokens.n_tokens, delta.error, delta.finish) == (2, "scripted failure at token 2", None)
        assert made.abort("t") is None
    made.submit(request())
    [delta] = made.poll(0.0)
    assert (delta.tokens.n_tokens, delta.finish) == (4, "stop")


def test_a_hanging_trajectory_keeps_its_place_and_others_go_on() -> None:
    script = by_trajectory({"stuck": Answer(ids=(1, 2, 3), hang_at=1)}, FIVE)
    made = ScriptedEngine(script, max_running=2, tokens_per_poll=3)
    made.load({}, 0)
    for name in ("stuck", "a", "b"):
        made.submit(request(name))
    finished = [d.trajectory_id for _ in range(10) for d in made.poll(0.0) if d.finish]
    assert finished == ["a", "b"]
    assert made.stats().running == 1


def test_a_crash_ends_the_engine() -> None:
    made = engine(Answer(ids=(1, 2, 3, 4), crash_at=2))
    made.submit(request())
    assert made.poll(0.0)[0].tokens.n_tokens == 1
    with pytest.raises(Unavailable, match="token 2 of t"):
        made.poll(0.0)
    with pytest.raises(Unavailable):
        made.submit(request("other"))


_DEADLY = """
from laminar.operators.rollout.engine import EngineRequest, EngineStats
from laminar.operators.rollout.engines.scripted import ScriptedEngine, seeded
from laminar.schemas.records import Sampling

engine = ScriptedEngine(seeded(deadly=["0/3/1"]))
engine.load({}, 0)
for name in ("d/0/3/11", "d/10/3/1", "d/0/3/1"):
    print(name, flush=True)
    engine.submit(EngineRequest(trajectory_id=name, prompt_ids=(1,), sampling=Sampling(max_tokens=8), seed=0))
    engine.poll(0.0), engine.poll(0.0)
"""


def test_a_deadly_trajectory_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _DEADLY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[-1], done.stderr) == (EXITED, "d/0/3/1", "")


def test_a_rejected_request_and_a_refused_version() -> None:
    made = engine(Answer(ids=(1,), reject="not today"), refuse_versions=frozenset({3}))
    with pytest.raises(InvalidRequest, match="not today"):
        made.submit(request())
    with pytest.raises(WeightsMismatch):
        made.load({}, 3)
    assert (made.version, made.loads, made.submitted) == (0, [0], [])


def test_unsound_logprobs_pass_through_unchecked() -> None:
    made = engine(Answer(ids=(1, 2), logprobs=(-0.5, math.nan)), tokens_per_poll=2)
    made.submit(request())
    [delta] = made.poll(0.0)
    assert math.isnan(delta.tokens.logprobs_T[1])


def test_a_full_cache_preempts_the_youngest_and_loses_no_token() -> None:
    made = engine(Answer(ids=tuple(range(20))), kv_total=30, tokens_per_poll=4)
    names = ["a", "b", "c"]
    for name in names:
        made.submit(request(name))
    parts: dict[str, list[int]] = {name: [] for name in names}
    finished = []
    for _ in range(60):
        for delta in made.poll(0.0):
            parts[delta.trajectory_id] += delta.tokens.ids_T.tolist()
            finished += [delta.trajectory_id] if delta.finish else []
        assert made.stats().kv_used <= 30
    assert finished == names
    assert all(ids == list(range(20)) for ids in parts.values())
    assert made.stats().preempted > 0


def test_the_seeded_script_is_a_function_of_prompt_and_seed() -> None:
    script = seeded(min_tokens=3, max_tokens=9, vocab_size=5)
    assert script(request("a")) == script(request("b"))
    lengths = set()
    for seed in range(200):
        what = EngineRequest(trajectory_id="t", prompt_ids=(1,), sampling=Sampling(max_tokens=99), seed=seed)
        answer = script(what)
        lengths.add(len(answer.ids))
        assert max(answer.ids) < 5
    assert lengths == set(range(3, 10))


@pytest.mark.parametrize("settings", [{"tokens_per_s": 1.0}, {"clock": Clock()}, {"tokens_per_poll": 0}])
def test_speeds_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ScriptedEngine(always(FIVE), **settings)  # type: ignore[arg-type]


def test_a_lost_engine_has_forgotten_everything_and_is_back_after_its_time() -> None:
    now = [100.0]
    engine = ScriptedEngine(always(Answer(ids=tuple(range(40)))), tokens_per_s=10.0, clock=lambda: now[0], away=2.0)
    engine.load({}, 3)
    engine.submit(request("p/0"))
    now[0] += 0.5
    assert engine.poll(0.0)[0].tokens.n_tokens == 5
    engine.lose()
    now[0] += 0.5
    with pytest.raises(EngineLost, match="was lost in abort"):
        engine.abort("p/0")
    assert (engine.ready, engine.version, engine.losses) == (False, -1, 1)
    assert engine.stats() == EngineStats(running=0, waiting=0, kv_used=0, kv_total=65536)
    assert engine.abort("p/0") is None
    for call in (lambda: engine.submit(request("p/0")), lambda: engine.load({}, 3)):
        with pytest.raises(Unavailable, match="has not started anew yet"):
            call()
    now[0] += 1.9
    assert engine.poll(0.0) == []
    assert not engine.ready
    now[0] += 0.2
    assert engine.poll(0.0) == []
    assert (engine.ready, engine.version) == (True, -1)
    engine.load({}, 4)
    engine.submit(request("p/0"))
    assert engine.poll(0.0) == []
    now[0] += 0.1
    assert engine.poll(0.0)[0].tokens.ids_T.tolist() == [0]


def test_an_engine_is_lost_at_a_token_or_when_it_is_given_up() -> None:
    engine = ScriptedEngine(always(Answer(ids=tuple(range(9)), lose_at=3)), tokens_per_poll=2, away=1)
    for losses in (1, 2):
        engine.load({}, 0)
        engine.submit(request("p/0"))
        assert engine.poll(0.0)[0].tokens.n_tokens == 2
        with pytest.raises(EngineLost, match="at token 3 of p/0"):
            engine.poll(0.0)
        assert engine.losses == losses
        assert not engine.ready
        assert engine.poll(0.0) == []
        assert engine.ready
    with pytest.raises(EngineLost, match="was given up: a test"):
        engine.restart("a test")
    assert (engine.ready, engine.losses) == (False, 3)


def test_an_engine_that_lives_with_its_caller_cannot_be_lost() -> None:
    engine = ScriptedEngine(always(Answer(ids=(1,))))
    with pytest.raises(ConfigError, match="only one with `away`"):
        engine.lose()
    with pytest.raises(Unavailable, match="its process has to start anew"):
        engine.restart("a test")
