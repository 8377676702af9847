from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time

import pytest

from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.health import Readiness
from laminar.pipeline.health_watch import HealthWatch
from laminar.pipeline.pulse import Pulse
from laminar.streams.meter import Meter

HANGING = """
import sys, time
from laminar.pipeline.config.models import RunnerConfig
from laminar.pipeline.pulse import Pulse
from laminar.pipeline.runner import drive
from laminar.pipeline.stop_request import LeaveAtOnce, StopRequest

class Hanging:
    def step(self, now):
        print("in step", flush=True)
        time.sleep(100)
    def drain(self, now): return True
    def close(self): ...

stop = StopRequest()
stop.install()
try:
    with stop.interrupting():
        drive(Hanging(), settings=RunnerConfig(), drain_timeout_s=5, stop=stop, ended=lambda now: None, pulse=Pulse())
except LeaveAtOnce:
    print("left", flush=True)
time.sleep(100)
"""


def test_the_second_signal_leaves_a_step_that_hangs_and_the_third_does_not_wait_for_closing() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "in step\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None  # the first one waits for the step
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "left\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    finally:
        process.kill()
        process.communicate()


def test_a9_a_loop_that_stands_still_is_logged_once_with_the_line_that_holds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, pulse = MonitorConfig(probe_period_s=0.02), Pulse(state="running")
    over = threading.Event()

    def hold_the_loop() -> None:
        watch = HealthWatch(
            open_log=None,
            consumption=None,
            readiness=Readiness(settings, consumption=None, now=0.0),
            meter=Meter(),
            pulse=pulse,
            settings=settings,
            slow_step_s=0.1,
        )
        over.wait(30)
        watch.close()

    loop = threading.Thread(target=hold_the_loop)
    with caplog.at_level(logging.WARNING):
        loop.start()
        deadline = time.monotonic() + 30
        while "stood still" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        over.set()
        loop.join()
    (said,) = [record.getMessage() for record in caplog.records if "stood still" in record.getMessage()]
    assert "the loop has stood still for 0." in said
    assert "hold_the_loop (test_stop_request.py:" in said
