"""An engine in a process of its own, beside what the contract suite says of every engine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.rollout.config import ScriptedEngineConfig
from laminar.operators.rollout.engines.choice import build_engine
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.operators.rollout.engines.remote.supervisor import RemoteSettings
from laminar.operators.weights import TensorView
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import Tokens
from laminar.streams.memory import MemoryLog
from tests.integration.rollout.remote.driving import asked, made, so_far, until
from tests.integration.rollout.remote.faulty import IDS, PROMPT_THAT_IS_REFUSED


@pytest.fixture
def engine() -> Iterator[RemoteEngine]:
    made_ = made("counting", RemoteSettings(ahead=3, gather_s=0.0))
    yield made_
    made_.close()


def test_it_decodes_while_nobody_polls_but_only_so_far(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0"))
    time.sleep(1.0)
    rest = engine.abort("t/0")
    assert rest is not None
    assert 1 <= rest.tokens.n_tokens <= 4
    assert rest.tokens.ids_T.tolist() == list(IDS[: rest.tokens.n_tokens])


def test_all_that_came_between_two_polls_is_one_delta_for_each_trajectory() -> None:
    engine = made("counting")
    engine.submit(asked("t/0"))
    engine.submit(asked("t/1"))
    time.sleep(0.5)
    deltas = engine.poll(0.0)
    engine.close()
    assert sorted(delta.trajectory_id for delta in deltas) == ["t/0", "t/1"]
    assert min(delta.tokens.n_tokens for delta in deltas) > 1


def test_tokens_wait_a_little_for_more_of_them_but_the_last_one_comes_at_once() -> None:
    engine = made("counting", RemoteSettings(gather_s=3600.0))
    engine.submit(asked("t/0"))
    whole = so_far(engine, 1)
    assert [(delta.tokens.ids_T.tolist(), delta.finish) for delta in whole] == [(list(IDS), "stop")]
    engine.submit(asked("t/1"))
    engine.submit(asked("t/2"))
    time.sleep(0.02)
    rest = engine.abort("t/1")
    assert rest is not None
    deltas = so_far(engine, 60)
    engine.close()
    assert {delta.trajectory_id for delta in deltas} == {"t/2"}
    assert [token for delta in deltas for token in delta.tokens.ids_T.tolist()] == list(IDS)
    assert rest.tokens.ids_T.tolist() == list(IDS[: rest.tokens.n_tokens])


def test_a_request_that_only_the_process_can_refuse_comes_back_with_an_error(engine: RemoteEngine) -> None:
    engine.submit(asked("t/0", prompt=(1, PROMPT_THAT_IS_REFUSED)))
    deltas = []

    def came() -> bool:
        deltas.extend(engine.poll(0.01))
        return bool(deltas)

    until(came, "the refusal")
    assert [(d.trajectory_id, d.error, d.tokens.n_tokens) for d in deltas] == [
        ("t/0", "InvalidRequest: t/0: scripted refusal", 0)
    ]
    engine.submit(asked("t/0"))
    assert len(so_far(engine, 60)) > 1


def test_requests_that_the_process_has_not_seen_are_waiting(engine: RemoteEngine) -> None:
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for i in range(3):
        engine.submit(asked(f"t/{i}"))
    stats = engine.stats()
    os.kill(pid, signal.SIGCONT)
    assert (stats.running, stats.waiting) == (0, 3)
    so_far(engine, 3)
    assert engine.stats().running + engine.stats().waiting == 3


def test_a_trajectory_that_was_aborted_and_came_back_gets_no_token_of_its_first_life(engine: RemoteEngine) -> None:
    for _ in range(20):
        engine.submit(asked("t/0"))
        had = [delta.tokens for delta in so_far(engine, 1)]
        rest = engine.abort("t/0")
        assert rest is not None
        engine.submit(asked("t/0", sampled=Tokens.concat([*had, rest.tokens])))
        tail = [delta.tokens for delta in so_far(engine, 2)]
        got = Tokens.concat([*had, rest.tokens, *tail]).ids_T.tolist()
        assert got == list(IDS[: len(got)])
        engine.abort("t/0")


def test_weights_arrive_byte_for_byte_with_and_without_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "slot"
    file.write_bytes(b"before" + b"\x00\x00\x80\x3f" + b"after")
    at_home = TensorView(dtype="F32", shape=(1,), data=memoryview(b"\x00\x00\x80\x3f"), path=str(file), offset=6)
    homeless = TensorView(dtype="U8", shape=(3,), data=memoryview(b"abc"))
    empty = TensorView(dtype="F32", shape=(0,), data=memoryview(b""))
    engine = made("reads")
    with caplog.at_level(logging.INFO):
        engine.load({"a": at_home, "b": homeless, "c": empty, "d": homeless}, 4)
        engine.close()
    said = next(line for line in caplog.messages if "'a'" in line)
    for expected in ("'a': ('F32', (1,), b'\\x00\\x00\\x80?')", "'b': ('U8', (3,), b'abc')", "'c': ('F32', (0,), b'')"):
        assert expected in said
    assert said.count("b'abc'") == 2


@pytest.mark.parametrize("process", ["own", "shared"])
def test_a_run_file_says_where_the_engine_lives(process: str, tmp_path: Path) -> None:
    config = ScriptedEngineConfig.model_validate({"process": process, "max_running": 3, "tokens_per_s": 1e4})
    run = RunInfo(
        run_id="r", run_dir=tmp_path, steps=1, groups_per_step=1, group_size=1, max_staleness=None, seed=0,
        model=ModelConfig(path=tmp_path),
    )  # fmt: skip
    context = Context(run=run, name="rollout", instance="rollout-0", log=MemoryLog(), codec=Codec())
    engine = build_engine(config, context)
    try:
        assert isinstance(engine, RemoteEngine) == (process == "own")
        assert engine.limits.max_running == 3
        engine.load({}, 0)
        engine.submit(asked("t/0"))
        deltas = []

        def ended() -> bool:
            deltas.extend(engine.poll(0.01))
            return any(delta.finish for delta in deltas)

        until(ended, "the answer")
        assert engine.decode((7, 8)) == "7 8"
    finally:
        engine.close()
