"""Starts of an engine's process that fail, and its end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.rollout.engines.text import decimal
from laminar.schemas.errors import ConfigError, DeadlineExceeded, EngineLost, Unavailable
from tests.integration.rollout.engine_contract import torch_subject
from tests.integration.rollout.remote.driving import alive, asked, lost, made, recipe_of, until


def start(recipe: Recipe, settings: RemoteSettings | None = None) -> None:
    RemoteEngine(recipe, decoder=lambda: decimal, settings=settings).close()


def test_what_is_wrong_with_the_settings_is_the_same_line_as_in_this_process(tmp_path: Path) -> None:
    recipe = Recipe(
        factory="laminar.operators.rollout.engines.torch:TorchEngine", options={"model_path": str(tmp_path)}
    )
    with pytest.raises(ConfigError) as here:
        recipe.build()
    with pytest.raises(ConfigError) as there:
        start(recipe)
    assert str(there.value) == str(here.value)


def test_a_fault_of_the_engine_itself_is_said_with_its_last_words() -> None:
    with pytest.raises(Unavailable, match=r"exited with code 1: .*ZeroDivisionError: a fault in the engine"):
        start(recipe_of("ends", how="bug"))


def test_a_start_has_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"start of the engine's process: not within 2 s .*killed"):
        start(recipe_of("ends", how="slow"), RemoteSettings(start_timeout_s=2.0))


def test_want_of_memory_is_said_with_what_was_asked_for_and_what_there_is() -> None:
    options = {"model_path": str(torch_subject.folder()), "kv_total": 65536, "max_running": 4}
    numbers = (
        r"a KV cache of 65536 tokens \(engine\.kv_total\) is 0\.02 GiB, 256 bytes a token;"
        r" memory: [\d.]+ of [\d.]+ GiB free"
    )
    with pytest.raises(ConfigError, match=rf"not enough memory to start: {numbers}.*\(MemoryError\)"):
        start(recipe_of("ends_with", how="memory", **options))
    with pytest.raises(Unavailable, match=rf"killed by SIGKILL, before it was ready; .*{numbers}"):
        start(recipe_of("ends_with", how="killed", **options))


def test_later_starts_that_fail_wait_ever_longer_and_end_in_giving_up(tmp_path: Path) -> None:
    settings = RemoteSettings(restart_backoff_s=0.2, restart_backoff_max_s=60.0, start_attempts=3)
    marker = tmp_path / "starts"
    engine = made("second_fails", settings, marker=str(marker))
    try:
        with pytest.raises(EngineLost):
            engine.restart("a test")
        error = lost(engine, [])
        assert isinstance(error, Unavailable)
        assert str(error) == "engine: failed to start 3 times in a row: engine: only once"
        times = [float(line) for line in marker.read_text().splitlines()]
        assert len(times) == 3
        assert times[1] - times[0] >= 0.4
        assert times[2] - times[1] >= 0.8
        with pytest.raises(Unavailable):
            engine.poll(0.0)
    finally:
        engine.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_process_and_its_workers_end_with_a_parent_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    marker = tmp_path / "pids"
    code = f"""
        import time
        from tests.integration.rollout.remote.driving import made
        engine = made("with_worker", marker={str(marker)!r})
        print("ready", flush=True)
        time.sleep(3600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        pids = [int(text) for text in marker.read_text().split()]
        assert all(alive(pid) for pid in pids)
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    until(lambda: not any(alive(pid) for pid in pids), "the end of the orphans")


def test_a_closed_engine_leaves_no_process() -> None:
    engine = made("counting")
    pid = engine.pid
    assert pid is not None
    engine.submit(asked("t/0"))
    engine.close()
    assert not alive(pid)
    engine.close()
