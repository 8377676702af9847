from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from laminar.pipeline.run_folder import RunFolder
from laminar.pipeline.view import View
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import ConfigError
from laminar.streams.open import open_log
from laminar.streams.topics import outgoing, topic_specs
from tests.integration.pipeline.supervised import Hook, alive, supervise, toy_config, wait_until
from tests.support.dataflow import make_prompt


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def write(config_folder: Path, *records: r.Record) -> None:
    config = toy_config(config_folder, ["wait"])
    with closing(open_log(config.log, run_id=config.name)) as log:
        log.create_topics(topic_specs())
        codec = Codec()
        producer = log.producer("test")
        with producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(codec, record))
        producer.close()


def signal_once_up(pids: Path, n: int, *numbers: int) -> Callable[[View], None]:
    """Send one of the signals to ourselves at each look, from when ``n`` processes are up."""
    left = list(numbers)
    up: list[bool] = []

    def act(view: View) -> None:
        del view
        if not up and len(alive(pids)) >= n:
            up.append(True)
        if up and left:
            os.kill(os.getpid(), left.pop(0))

    return act


def test_sigterm_drains_every_process(tmp_path: Path, pids: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcome = supervise(toy_config(tmp_path, ["wait", "parent"]), Hook(signal_once_up(pids, 3, signal.SIGTERM)), pids)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert outcome.reason == "stopped by SIGTERM"
    assert "killing" not in caplog.text
    assert alive(pids) == []


def test_what_does_not_drain_is_killed_at_the_named_deadline(
    tmp_path: Path, pids: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = toy_config(tmp_path, ["wait", "stubborn"], drain_timeout_s=1.0)
    supervise(config, Hook(signal_once_up(pids, 2, signal.SIGINT)), pids)
    assert alive(pids) == []
    assert "killing stubborn-0: drain of all processes: not within 1 s" in caplog.text


def test_b18_three_sigterms_leave_no_orphan_and_the_next_start_works(
    tmp_path: Path, pids: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = toy_config(tmp_path, ["stubborn", "parent"], drain_timeout_s=60.0)
    three = signal_once_up(pids, 3, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)
    supervise(config, Hook(three), pids)
    assert "killing stubborn-0: 3 signals" in caplog.text
    assert alive(pids) == []
    again = supervise(config, Hook(signal_once_up(pids, 3, *[signal.SIGTERM] * 3)), pids)
    assert again.reason == "stopped by SIGTERM"
    assert alive(pids) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_9_of_the_supervisor_leaves_no_orphan(tmp_path: Path, pids: Path, stopped: bool) -> None:
    script = Path(__file__).with_name("supervised.py")
    supervisor = subprocess.Popen([sys.executable, str(script), str(tmp_path), "stubborn", "parent"], cwd=Path.cwd())
    try:
        wait_until(lambda: len(alive(pids)) == 3, "three processes are up")
        if stopped:
            for pid in alive(pids):
                os.kill(pid, signal.SIGSTOP)
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: alive(pids) == [], "no process is left")


def test_a_process_that_fails_is_started_again(tmp_path: Path, pids: Path) -> None:
    outcome = supervise(toy_config(tmp_path, ["late"]), Hook(signal_once_up(pids, 1, signal.SIGTERM)), pids)
    assert len(list(pids.iterdir())) == 3
    assert outcome.restarts == 2
    assert outcome.reason == "stopped by SIGTERM"


def test_what_a_killed_process_started_goes_with_it(tmp_path: Path, pids: Path) -> None:
    killed: list[int] = []

    def act(view: View) -> None:
        found = alive(pids)
        if not killed and len(found) == 2:
            killed.extend(found)
            os.kill(max(os.getpgid(pid) for pid in found), signal.SIGKILL)
        elif killed and len(found) == 2 and not set(found) & set(killed):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = supervise(toy_config(tmp_path, ["parent"]), Hook(act), pids)
    assert outcome.reason == "stopped by SIGTERM"
    assert outcome.restarts == 1
    assert alive(pids) == []


def test_a_process_that_refuses_its_configuration_ends_the_run_with_its_reason(tmp_path: Path, pids: Path) -> None:
    outcome = supervise(toy_config(tmp_path, ["wait", "wrong_config"]), Hook(), pids)
    assert outcome.exit_code == 2
    assert outcome.reason == "wrong_config-0 exited with code 78: Toy: wrong_config"
    assert alive(pids) == []


@pytest.mark.parametrize(("behaviour", "words"), [("retryable", "Toy: retryable"), ("bug", "RuntimeError: a bug")])
def test_too_many_failures_in_a_row_end_the_run(tmp_path: Path, pids: Path, behaviour: str, words: str) -> None:
    outcome = supervise(toy_config(tmp_path, [behaviour], max_restarts_in_a_row=2), Hook(), pids)
    assert outcome.exit_code == 75
    assert words in outcome.reason
    assert "3 failures in a row" in outcome.reason
    assert "no rollout has sent a heartbeat" in outcome.reason
    assert len(list(pids.iterdir())) == 3


def test_a1_without_progress_the_run_ends_and_names_topic_lag_and_heartbeat(tmp_path: Path, pids: Path) -> None:
    config = toy_config(tmp_path, ["rollout"], no_progress_timeout_s=3.0)
    sent: list[bool] = []

    def act(view: View) -> None:
        if not sent:
            sent.append(True)
            status = r.RolloutStatus(
                rollout_id="rollout-0", incarnation=1, state="sampling", version=0, kv_used=0, kv_total=1, running=0,
                waiting=0, preempted=0, max_running=1, tokens_per_s=0.0, in_flight=(), at_ms=int(time.time() * 1000),
            )  # fmt: skip
            write(tmp_path, make_prompt(0), make_prompt(1), status)

    config = config.model_copy(update={"operators": rollout_only()})
    outcome = supervise(config, Hook(act), pids)
    assert outcome.exit_code == 75
    assert outcome.reason.startswith(
        "no progress for 3 s: topic prompts has a lag of 2 (group toys.rollout);"
        " last heartbeat of a rollout: rollout-0, "
    )
    assert alive(pids) == []


def rollout_only() -> dict[str, object]:
    from laminar.operators.rollout.config import RolloutConfig

    return {"rollout": RolloutConfig()}


def test_a7_the_end_event_ends_the_run_with_0(tmp_path: Path, pids: Path) -> None:
    config = toy_config(tmp_path, ["wait", "stubborn"], drain_timeout_s=2.0)
    sent: list[bool] = []

    def act(view: View) -> None:
        if not sent and len(alive(pids)) == 2:
            sent.append(True)
            write(tmp_path, r.RunEnded(run_id="toys", epoch=0, step=10, reason="data exhausted at step 10", at_ms=0))

    outcome = supervise(config, Hook(act), pids)
    assert (outcome.exit_code, outcome.reason) == (0, "data exhausted at step 10")
    assert alive(pids) == []


def test_a_resumed_run_is_not_ended_by_the_end_of_the_run_before(tmp_path: Path, pids: Path) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path, r.RunEnded(run_id="toys", epoch=0, step=10, reason="all steps", at_ms=0))
    outcome = supervise(toy_config(tmp_path, ["wait"]), Hook(signal_once_up(pids, 1, signal.SIGTERM)), pids)
    assert outcome.reason == "stopped by SIGTERM"


def test_a_folder_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    config = toy_config(tmp_path, ["wait"])
    with (
        RunFolder(config),
        pytest.raises(ConfigError, match=rf"in use by another `laminar run` \(process {os.getpid()}\)"),
    ):
        RunFolder(config)
    with RunFolder(config) as again:
        assert not again.resumed
        again.write_config(config)
    with RunFolder(config) as resumed:
        assert resumed.resumed


def test_each_process_has_its_own_log(tmp_path: Path, pids: Path) -> None:
    config = toy_config(tmp_path, ["wrong_config"])
    supervise(config, Hook(), pids)
    lines = (tmp_path / "run" / "logs" / "wrong_config-0.log").read_text().splitlines()
    assert json.loads(lines[0])["message"] == "Toy: wrong_config"
