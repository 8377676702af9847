from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from laminar.operators.registry import build as build_operator
from laminar.operators.registry import config_class
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.functions import Score, exact, score_of, truncation_penalty
from laminar.operators.reward.operator import build
from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError
from laminar.streams.deadline import Deadline
from laminar.streams.loop import Loop
from tests.support import sample
from tests.support.dataflow import World

OBEY = "tests.support.rewards:obey"


def said(text: str, index: int = 0, **changes: Any) -> r.CompletedTrajectory:
    return sample.completed(sample.prompt(index), text=text, **changes)


class Bench:
    """A reward operator over a memory log, stepped until what is asked for has come."""

    def __init__(self) -> None:
        self.world = World()
        self.loops: list[Loop] = []

    def start(self, **settings: Any) -> Loop:
        loop = build(RewardConfig(**settings), self.world.context("reward"))
        self.loops.append(loop)
        return loop

    def step_until(self, loop: Loop, done: Callable[[], bool]) -> float:
        """Returns the longest step in seconds."""
        deadline, longest = Deadline.after(120, "reward"), 0.0
        while not done():
            deadline.check()
            start = time.perf_counter()
            busy = loop.step(self.world.now)
            longest = max(longest, time.perf_counter() - start)
            self.world.advance(0.1)
            if not busy:
                time.sleep(0.005)
        return longest

    def scored(self) -> dict[str, r.ScoredTrajectory]:
        found = self.world.read("trajectories.scored", r.ScoredTrajectory)
        by_text = {one.trajectory.text: one for one in found}
        assert len(by_text) == len(found)
        return by_text

    def score(self, *records: r.CompletedTrajectory, **settings: Any) -> dict[str, r.ScoredTrajectory]:
        loop = self.start(**settings)
        self.world.write(*records)
        self.step_until(loop, lambda: len(self.scored()) == len(records))
        return self.scored()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for loop in bench.loops:
        loop.close()


@pytest.mark.parametrize(
    ("text", "finish", "options", "reward"),
    [
        ("abc", "stop", {}, 1.0),
        (" abc\n", "stop", {}, 1.0),
        (" abc\n", "stop", {"strip": False}, 0.0),
        ("abd", "stop", {}, 0.0),
        ("ABC", "stop", {}, 0.0),
        ("ABC", "stop", {"ignore_case": True}, 1.0),
        ("abc", "length", {}, 0.0),
        ("abc", "length", {"require_stop": False}, 1.0),
    ],
)
def test_exact_compares_text_and_finish_reason(text: str, finish: str, options: dict[str, bool], reward: float) -> None:
    assert exact(said(text, finish=finish), **options) == Score(reward=reward)


def test_exact_without_a_reference_answer_is_a_failure_not_a_zero() -> None:
    found = exact(sample.completed(sample.prompt(reference=None)))
    assert (found.reward, found.failure) == (None, "data/0/0 has no reference answer")


@pytest.mark.parametrize(
    ("value", "reward", "failure"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (0.25, 0.25, None),
        (Score(reward=2.0), 2.0, None),
        (None, None, "returned None"),
        ("good", None, "returned str, not a number"),
        ([1.0], None, "returned list, not a number"),
        (math.nan, None, "returned nan"),
        (Score(reward=math.inf), None, "returned inf"),
        (Score(reward=None), None, "returned no reward"),
        (Score(reward=None, failure="no proof"), None, "no proof"),
    ],
)
def test_f4_only_a_finite_number_is_a_reward(value: object, reward: float | None, failure: str | None) -> None:
    score = score_of(value)
    assert score.reward == reward
    assert (score.failure is None) if failure is None else (failure in (score.failure or ""))


def test_f7_the_soft_penalty_grows_over_the_last_tokens_before_the_limit() -> None:
    def penalty(n_tokens: int, finish: str = "stop") -> float:
        of = sample.completed(response=sample.tokens(n_tokens), finish=finish)  # max_tokens is 32
        return truncation_penalty(of, penalty=2.0, penalty_tokens=8)

    assert [penalty(n) for n in (3, 24, 26, 28, 32)] == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert penalty(32, "length") == 2.0
    assert truncation_penalty(sample.completed(finish="length"), penalty=2.0, penalty_tokens=0) == 2.0


def test_exact_scores_every_trajectory_and_keeps_it_whole(bench: Bench) -> None:
    right, wrong = said("abc"), said("cab", 1)
    found = bench.score(right, wrong)
    assert found["abc"].trajectory == right
    assert (found["abc"].reward, found["cab"].reward) == (1.0, 0.0)
    assert (found["abc"].function, found["abc"].failure) == ("exact", None)


def test_f7_a_truncated_output_keeps_its_finish_reason_and_has_a_policy(bench: Bench) -> None:
    found = bench.score(
        said("abc"),
        said("abcabc", 1, finish="length"),
        sample.completed(sample.prompt(2, purpose="eval"), text="eval", finish="length"),
        on_truncated="penalty",
        penalty=0.5,
    )
    assert (found["abc"].reward, found["abc"].components) == (1.0, {})
    assert found["abcabc"].trajectory.finish == "length"
    assert (found["abcabc"].reward, found["abcabc"].components) == (-0.5, {"length_penalty": -0.5})
    assert found["eval"].reward == 0.0


def test_f7_more_than_half_of_a_window_truncated_is_a_warning(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bench.score(*[said(f"{n}", n, finish="length" if n < 3 else "stop") for n in range(4)], window=4)
    assert "3 of the last 4 trajectories are truncated at 32 tokens" in caplog.text


def test_f7_half_of_a_window_truncated_is_none(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bench.score(*[said(f"{n}", n, finish="length" if n < 2 else "stop") for n in range(4)], window=4)
    assert caplog.text == ""


def test_a_function_of_ones_own_is_called_with_its_options(bench: Bench) -> None:
    found = bench.score(said("return 2"), said("pid", 1), function=OBEY, options={"scale": 3.0})
    assert found["return 2"].reward == 6.0
    assert found["return 2"].function == OBEY
    assert found["pid"].components == {"half": 0.5}
    assert found["pid"].meta["pid"] != str(os.getpid())


def test_f4_infrastructure_failures_are_null_rewards_with_a_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ("raise", "none", "text", "exit", "segfault", "return 1")
    with caplog.at_level(logging.WARNING):
        found = bench.score(*[said(text, n) for n, text in enumerate(texts)], function=OBEY, window=6)
    assert found["return 1"].reward == 1.0
    for text, reason in {
        "raise": "ConnectionError: the judge is away",
        "none": "returned None",
        "text": "returned str, not a number",
        "exit": "ended with status 3",
        "segfault": "ended with status -11",
    }.items():
        assert found[text].reward is None
        assert reason in (found[text].failure or "")
    assert "5 of the last 6 trajectories have no reward" in caplog.text
    assert bench.world.read("dead.letters", r.DeadLetter) == []


def test_a_call_that_raises_is_tried_again(bench: Bench, tmp_path: Path) -> None:
    text = f"once {tmp_path / 'seen'}"
    assert bench.score(said(text), function=OBEY)[text].reward == 1.0


def test_f5_a_call_that_never_returns_is_killed_at_its_limit_and_the_workers_are_still_there(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = bench.score(
            said("regex"),
            *[said(f"return {n}", n) for n in range(1, 5)],
            function=OBEY,
            concurrency=1,
            timeout_s=1.5,
            max_attempts=2,
        )
    assert (found["regex"].reward, found["regex"].failure) == (None, "no answer within 1.5 s")
    assert [found[f"return {n}"].reward for n in range(1, 5)] == [1.0, 2.0, 3.0, 4.0]
    assert "data/0/0/0: attempt 2 of 2 failed" in caplog.text  # F6: the stuck sample's id


def test_f6_latency_is_a_histogram_and_a_stuck_sample_is_named_while_it_is_stuck(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    context = bench.world.context("reward")
    loop = build(RewardConfig(function=OBEY, concurrency=2, timeout_s=60.0), context)
    bench.loops.append(loop)
    bench.world.write(said("return 1", 1))
    bench.step_until(loop, lambda: len(bench.scored()) == 1)
    assert context.measures.histogram("reward_latency_seconds").cumulative()[-1] == (math.inf, 1)
    bench.world.write(said("sleep 100"))
    loop._calls._worker._pool._timeout_s = 0.4  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        bench.step_until(loop, lambda: "has been at it" in caplog.text)
    assert "data/0/0/0: the reward function has been at it for" in caplog.text


def test_a9_while_a_function_blocks_the_operator_stays_in_its_group_and_scores_the_others(bench: Bench) -> None:
    loop = bench.start(function=OBEY, concurrency=2, max_in_hand=4)
    others = [said(f"return {n}", n) for n in range(1, 25)]
    bench.world.write(said("sleep 30"), *others)
    blocked = {p for p, end in bench.world.log.lag("run.reward", "trajectories.completed").items() if end}
    start = bench.world.now
    longest = bench.step_until(loop, lambda: bench.world.now > start + 40 and len(bench.scored()) > 12)
    assert longest < 15.0  # the function blocks for 30 s
    left = {p for p, n in bench.world.log.lag("run.reward", "trajectories.completed").items() if n}
    assert len(left) == 1
    assert left < blocked
    assert loop._consumer.assignment() >= blocked
    assert loop.counts.rewinds == 0


def test_close_leaves_no_process_behind(bench: Bench) -> None:
    loop = bench.start(function=OBEY, concurrency=2)
    pids = [process.popen.pid for process in loop._calls._worker._pool._processes]  # type: ignore[attr-defined]
    bench.world.write(said("regex"))
    bench.step_until(loop, lambda: loop.in_hand == 1)
    loop.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_operator_takes_a_hanging_function_with_it() -> None:
    script = (
        "import time\n"
        "from laminar.operators.reward.pool import Pool\n"
        "from laminar.streams.deadline import Deadline\n"
        "from tests.support import sample\n"
        f"pool = Pool({OBEY!r}, concurrency=1)\n"
        "pool.start(Deadline.after(60, 'start'))\n"
        "pool.submit(1, sample.completed(text='regex'))\n"
        "print(pool._processes[0].popen.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as operator:
        assert operator.stdout is not None
        pid = int(operator.stdout.readline())
        operator.kill()
    deadline = Deadline.after(10, "the function's process ends")
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        deadline.check()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "tests.support.nothing:f"}, "tests.support.nothing:f: ModuleNotFoundError"),
        ({"function": "tests.support.rewards:nothing"}, "AttributeError"),
        ({"function": "tests.support.rewards:NOT_CALLABLE"}, "is int, not callable"),
        ({"function": OBEY, "options": {"scal": 1}}, "unexpected keyword argument 'scal'"),
        ({"function": "exact", "options": {"stripp": 1}}, "valid for exact: strip, ignore_case, require_stop"),
    ],
)
def test_a_function_that_cannot_be_used_is_a_config_error_at_the_start(
    bench: Bench, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.start(**settings)


@pytest.mark.parametrize("settings", [{"function": "exat"}, {"timeout_s": 0}, {"max_in_hand": 1, "concurrency": 2}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig(**settings)


def test_the_registry_builds_the_operator(bench: Bench) -> None:
    operator = build_operator(config_class("reward")(), bench.world.context("reward"))
    assert operator.step(bench.world.now) is False
    assert operator.drain(bench.world.now) is True
    operator.close()
