"""Calls beside a step."""

from __future__ import annotations

import threading

import pytest

from laminar.streams import background
from laminar.streams.background import in_background

WAIT_S = 10.0


def test_calls_one_after_the_other_share_a_thread_and_two_at_a_time_do_not() -> None:
    seen: list[int] = []
    for _ in range(20):
        assert in_background(lambda: seen.append(threading.get_ident())).wait(WAIT_S)
    assert len(set(seen)) == 1
    gate = threading.Event()
    slow = in_background(lambda: (gate.wait(WAIT_S), seen.append(threading.get_ident()))[0])  # type: ignore[arg-type,return-value]
    other = in_background(lambda: seen.append(threading.get_ident()))
    assert other.wait(WAIT_S)
    assert not slow.done()
    gate.set()
    assert slow.wait(WAIT_S)
    assert seen[-1] != seen[-2]


def test_what_a_call_raised_is_raised_by_its_result_and_its_thread_lives_on() -> None:
    def broken() -> None:
        raise ValueError("no")

    first = in_background(broken)
    assert first.wait(WAIT_S)
    with pytest.raises(ValueError, match="no"):
        first.result()
    second = in_background(lambda: None)
    assert second.wait(WAIT_S)
    second.result()


def test_a_result_is_not_there_before_the_end() -> None:
    gate = threading.Event()
    call = in_background(lambda: (gate.wait(WAIT_S), None)[1])
    with pytest.raises(AssertionError, match="has not ended"):
        call.result()
    assert not call.wait(0.01)
    gate.set()
    assert call.wait(WAIT_S)


def test_a_thread_without_work_ends_and_the_next_call_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.02)
    monkeypatch.setattr(background, "_idle", [])  # those of other tests wait for longer
    seen: list[threading.Thread] = []
    assert in_background(lambda: seen.append(threading.current_thread())).wait(WAIT_S)
    seen[0].join(WAIT_S)
    assert not seen[0].is_alive()
    assert background._idle == []
    assert in_background(lambda: seen.append(threading.current_thread())).wait(WAIT_S)
    seen[1].join(WAIT_S)
    assert seen[1] is not seen[0]
