"""What every engine does in a process of its own when that is killed, or stopped, mid-generation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.engines.remote.health import Silence
from laminar.operators.rollout.engines.remote.proxy import RemoteEngine
from laminar.schemas.errors import EngineLost
from laminar.schemas.tokens import Tokens
from tests.integration.rollout.engine_contract.subject import Drive, Subject, request, response_of
from tests.integration.rollout.remote.driving import again, alive, lost

Make = Callable[..., Subject]

pytestmark = pytest.mark.parametrize("make", ["scripted-process", "torch-process", "vllm-process"], indirect=True)


def test_a6_a_killed_process_is_lost_once_and_its_trajectory_resumes_token_identically(make: Make) -> None:
    subject = make()
    engine, prompt = _engine(subject), subject.prompts[2]
    text = engine.decode((5, 6, 7))
    whole, _ = response_of(engine, request("whole", prompt))
    had, error = _cut(subject, signal.SIGKILL)
    assert "was killed by SIGKILL" in str(error)
    assert (engine.version, engine.ready, engine.stats().running) == (-1, False, 0)
    again(engine)
    assert engine.version == -1
    engine.load(subject.weights(0), 0)
    tail, _ = response_of(engine, request("cut", prompt, sampled=had))
    both = Tokens.concat([had, tail])
    assert both.ids == whole.ids
    assert abs(both.logprobs_T - whole.logprobs_T).max() < 1e-5
    assert engine.decode((5, 6, 7)) == text


def test_a6_a_stopped_process_is_lost_within_its_deadline_and_killed(make: Make) -> None:
    subject = make()
    engine = _engine(subject)
    whole, _ = response_of(engine, request("whole", subject.prompts[2]))
    engine._silence = Silence(4.0, time.monotonic())
    had, error = _cut(subject, signal.SIGSTOP)
    assert "reported nothing for 4 s, with 1 requests in it, and was killed" in str(error)
    assert had.ids == whole[: had.n_tokens].ids


def _engine(subject: Subject) -> RemoteEngine:
    assert isinstance(subject.engine, RemoteEngine)
    return subject.engine


def _cut(subject: Subject, how: signal.Signals) -> tuple[Tokens, Exception]:
    """What came of a request until the process got this signal, and the error."""
    engine = _engine(subject)
    pid = engine.pid
    assert pid is not None
    engine.submit(request("cut", subject.prompts[2]))
    cut = Drive(engine)
    cut.until_tokens("cut", 7)
    os.kill(pid, how)
    rest: list[Delta] = []
    error = lost(engine, rest)
    for delta in rest:
        cut.take(delta)
    assert isinstance(error, EngineLost)
    assert engine.poll(0.0) == []
    assert not alive(pid)
    had = cut.tokens("cut")
    assert 7 <= had.n_tokens < 24
    return had, error
