from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from laminar.pipeline.config.models import RunnerConfig
from laminar.pipeline.exit_code import exit_code_of
from laminar.pipeline.pulse import Pulse
from laminar.pipeline.runner import drive
from laminar.pipeline.stop_request import StopRequest
from laminar.schemas.errors import ConfigError, Fenced, LaminarError, Unavailable
from laminar.schemas.records import RunEnded

END = RunEnded(run_id="run", epoch=0, step=7, reason="all 7 steps are done", at_ms=0)


@dataclass
class Script:
    """An operator that works for so many steps, then idles; ``in_hand`` calls of drain until nothing is in hand."""

    work: int = 0
    in_hand: int = 0
    steps: int = 0
    drains: int = 0

    def step(self, now: float) -> bool:
        self.steps += 1
        self.work -= 1
        return self.work >= 0

    def drain(self, now: float) -> bool:
        self.drains += 1
        self.in_hand -= 1
        return self.in_hand < 0

    def close(self) -> None:
        raise AssertionError("the caller closes")


@dataclass
class Time:
    """A clock that passes only by waiting; ``then`` is called at its moment."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def run(operator: Script, time: Time, stop: StopRequest, *, end_at: float | None = None) -> str:
    return drive(
        operator,
        settings=RunnerConfig(),
        drain_timeout_s=5.0,
        stop=stop,
        ended=lambda now: END if end_at is not None and now >= end_at else None,
        pulse=Pulse(),
        clock=lambda: time.now,
        sleep=time.sleep,
    )


def test_b16_an_operator_stops_at_the_end_event_and_drains() -> None:
    operator, time = Script(in_hand=3), Time()
    assert run(operator, time, StopRequest(), end_at=1.0) == "the run ended at step 7: all 7 steps are done"
    assert operator.drains == 4
    assert 1.0 <= time.now < 1.5


def test_waiting_grows_while_idle_and_is_short_after_work() -> None:
    operator, time = Script(work=0), Time()
    run(operator, time, StopRequest(), end_at=1.0)
    idle = time.waits
    assert idle[:6] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02]
    assert max(idle) == 0.02


def test_work_is_not_waited_for() -> None:
    stop, time = StopRequest(), Time()

    class Busy(Script):
        def step(self, now: float) -> bool:
            if self.steps == 99:
                stop.request("SIGTERM")
            return super().step(now)

    operator = Busy(work=1000)
    assert run(operator, time, stop) == "SIGTERM"
    assert operator.steps == 100
    assert time.waits == []


def test_a_signal_drains_within_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    stop, time = StopRequest(), Time()
    stop.request("SIGTERM")
    operator = Script(in_hand=10**9)
    assert run(operator, time, stop) == "SIGTERM"
    assert operator.steps == 0
    assert 5.0 <= time.now < 5.1
    assert "drain: not within 5 s" in caplog.text


def test_a_second_signal_leaves_at_once() -> None:
    stop, time = StopRequest(), Time()
    stop.request("SIGTERM")

    class Stubborn(Script):
        def drain(self, now: float) -> bool:
            if self.drains == 3:
                stop.request("SIGTERM")
            return super().drain(now)

    run(Stubborn(in_hand=10**9), time, stop)
    assert time.now < 0.1


def test_a_slow_step_is_logged_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    time, pulse = Time(), Pulse()

    class Slow(Script):
        def step(self, now: float) -> bool:
            time.now += 6.0
            return False

    drive(
        Slow(),
        settings=RunnerConfig(),
        drain_timeout_s=5.0,
        stop=StopRequest(),
        ended=lambda now: END if now >= 6.0 else None,
        pulse=pulse,
        clock=lambda: time.now,
        sleep=time.sleep,
    )
    assert pulse.longest_step_s == pytest.approx(6.0)
    assert pulse.idle_steps == 1
    assert "a step took 6.0 s" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("x"), 75), (Fenced("x"), 76), (ConfigError("x"), 78), (LaminarError("x"), 70)]
)
def test_exit_codes_say_whether_trying_again_helps(error: LaminarError, code: int) -> None:
    assert exit_code_of(error) == code
