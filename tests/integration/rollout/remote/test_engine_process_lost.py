"""An engine's process that dies or hangs: it is noticed once, no token comes twice, and a new one takes over."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.schemas.errors import EngineLost, Unavailable
from tests.integration.rollout.remote.driving import again, alive, asked, lost, made, so_far, until
from tests.integration.rollout.remote.faulty import IDS

QUICK = RemoteSettings(
    hung_after_s=1.0, load_hung_after_s=1.0, restart_backoff_s=0.05, restart_backoff_max_s=0.2, gather_s=0.0
)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens.ids_T.tolist()]


@pytest.fixture
def engine() -> Iterator[RemoteEngine]:
    made_ = made("counting", QUICK)
    yield made_
    made_.close()


def pid_of(engine: RemoteEngine) -> int:
    assert engine.pid is not None
    return engine.pid


def test_a6_what_had_arrived_before_the_kill_is_given_out_first_and_nothing_twice(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0"))
    had = so_far(engine, 3)
    time.sleep(0.1)  # more of it lies unread now
    os.kill(pid_of(engine), signal.SIGKILL)
    until(lambda: not alive(pid_of(engine)), "the end of the process")
    rest: list[Delta] = []
    assert isinstance(lost(engine, rest), EngineLost)
    assert ids_of(rest)
    got = ids_of(had + rest)
    assert got == list(IDS[: len(got)])
    assert engine.poll(0.0) == []
    assert engine.abort("t/0") is None


def test_an_abort_after_the_death_of_the_process_returns_what_had_arrived(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0"))
    had = so_far(engine, 3)
    time.sleep(0.1)
    os.kill(pid_of(engine), signal.SIGKILL)
    until(lambda: not alive(pid_of(engine)), "the end of the process")
    rest = engine.abort("t/0")
    assert rest is not None
    got = ids_of([*had, rest])
    assert len(got) > ids_of(had)[-1]
    assert got == list(IDS[: len(got)])
    assert isinstance(lost(engine, []), EngineLost)


def test_an_abort_that_notices_the_death_leaves_to_the_others_what_had_arrived(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0"))
    engine.submit(asked("t/1"))
    had = so_far(engine, 6)
    time.sleep(0.1)
    os.kill(pid_of(engine), signal.SIGKILL)
    until(lambda: not alive(pid_of(engine)), "the end of the process")
    assert engine.abort("t/0") is not None
    assert not engine.ready
    rest: list[Delta] = []
    assert isinstance(lost(engine, rest), EngineLost)
    assert {delta.trajectory_id for delta in rest} == {"t/1"}
    got = ids_of([delta for delta in had + rest if delta.trajectory_id == "t/1"])
    assert got == list(IDS[: len(got)])


def test_a_stopped_process_is_noticed_killed_and_replaced(engine: RemoteEngine) -> None:
    first = pid_of(engine)
    engine.submit(asked("t/0"))
    so_far(engine, 1)
    os.kill(first, signal.SIGSTOP)
    error = lost(engine, [])
    assert isinstance(error, EngineLost)
    assert "reported nothing for 1 s, with 1 requests in it, and was killed" in str(error)
    assert not alive(first)
    again(engine)
    assert pid_of(engine) != first
    engine.load({}, 7)
    engine.submit(asked("t/0"))
    assert {int(v) for delta in so_far(engine, 60) for v in delta.tokens.versions_T} == {7}


def test_a_process_that_hangs_in_a_poll_is_lost_with_the_place_where_it_hung() -> None:
    engine = made("sleepy", QUICK)
    try:
        engine.submit(asked("t/0"))
        deltas: list[Delta] = []
        error = lost(engine, deltas)
        assert ids_of(deltas) == list(IDS[:5])
        assert isinstance(error, EngineLost)
        assert re.search(r'reported nothing for 1 s.*faulty\.py", line \d+ in poll', str(error))
    finally:
        engine.close()


def test_an_abort_of_a_stopped_process_ends_within_the_deadline_with_what_had_arrived(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0"))
    had = so_far(engine, 2)
    os.kill(pid_of(engine), signal.SIGSTOP)
    rest = engine.abort("t/0")
    assert rest is not None
    got = ids_of([*had, rest])
    assert got == list(IDS[: len(got)])
    assert isinstance(lost(engine, []), EngineLost)


def test_a_process_without_work_may_be_silent(engine: RemoteEngine) -> None:
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        assert engine.poll(0.01) == []
        time.sleep(0.02)
    engine.submit(asked("t/0"))
    assert ids_of(so_far(engine, 60)) == list(IDS)


def test_the_death_of_a_process_without_work_is_noticed_by_whoever_asks_whether_it_is_ready(
    engine: RemoteEngine,
) -> None:
    assert engine.ready
    os.kill(pid_of(engine), signal.SIGKILL)
    until(lambda: not engine.ready, "notice of the death")
    with pytest.raises(EngineLost, match="was killed by SIGKILL"):
        engine.poll(0.0)
    assert engine.poll(0.0) == []


def test_a_signal_to_all_processes_leaves_the_end_to_the_operator(engine: RemoteEngine) -> None:
    os.kill(pid_of(engine), signal.SIGTERM)
    os.kill(pid_of(engine), signal.SIGINT)
    engine.submit(asked("t/0"))
    assert ids_of(so_far(engine, 60)) == list(IDS)


def test_a_process_that_dies_while_it_loads_is_lost_by_the_load() -> None:
    engine = made("weights_fall", QUICK)
    try:
        with pytest.raises(EngineLost, match="was killed by SIGKILL"):
            engine.load({}, 1)
        assert engine.version == -1
        with pytest.raises(Unavailable, match="has not started anew yet"):
            engine.load({}, 1)
        again(engine)
        engine.load({}, 0)
        assert engine.version == 0
    finally:
        engine.close()


def test_a_process_that_hangs_while_it_loads_is_lost_by_the_load() -> None:
    engine = made("asleep_in_load", QUICK)
    try:
        with pytest.raises(EngineLost, match="reported nothing for 1 s, asked for: load of version 1"):
            engine.load({}, 1)
    finally:
        engine.close()


def test_the_error_carries_the_exit_code_and_the_last_words() -> None:
    engine = made("long_words", QUICK)
    try:
        engine.submit(asked("t/0"))
        error = lost(engine, [])
        assert isinstance(error, EngineLost)
        assert str(error).endswith("exited with code 7: CUDA error: an illegal memory access was encountered")
    finally:
        engine.close()


def test_an_engine_that_goes_out_of_service_is_started_anew() -> None:
    engine = made("breaks", QUICK)
    try:
        engine.submit(asked("t/0"))
        deltas: list[Delta] = []
        error = lost(engine, deltas)
        assert isinstance(error, EngineLost)
        assert "is out of service: the engine crashed at token 4 of t/0" in str(error)
        assert ids_of(deltas) == list(IDS[: len(ids_of(deltas))])
        again(engine)
    finally:
        engine.close()


def test_restart_loses_it_on_purpose(engine: RemoteEngine) -> None:
    first = pid_of(engine)
    engine.submit(asked("t/0"))
    with pytest.raises(EngineLost, match="was given up: its logprobs are wrong"):
        engine.restart("its logprobs are wrong")
    assert not alive(first)
    assert not engine.ready
    again(engine)
    engine.load({}, 1)
    assert engine.version == 1


def test_workers_of_the_process_are_killed_with_it(tmp_path: Path) -> None:
    engine = made("with_worker", QUICK, marker=str(tmp_path / "pids"))
    process, worker = (int(text) for text in (tmp_path / "pids").read_text().split())
    engine.submit(asked("t/0"))
    os.kill(process, signal.SIGKILL)
    assert isinstance(lost(engine, []), EngineLost)
    until(lambda: not alive(worker), "the end of the worker")
    engine.close()
