from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.pipeline.config.models import MonitorConfig
from laminar.pipeline.health import Backlog, Health, Readiness
from laminar.pipeline.lag import Consumption, Progress
from laminar.pipeline.pulse import Pulse
from laminar.streams.log import TopicPartition

TOPIC = "trajectories.completed"
P0, P1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
SETTINGS = MonitorConfig(stuck_after_s=100, standby_after_s=20, unanswered_after_s=30, stalled_after_s=60)


def backlog(
    waiting: dict[TopicPartition, int],
    *,
    committed: dict[TopicPartition, int] | None = None,
    assigned: frozenset[TopicPartition] = frozenset({P0, P1}),
    progress: Progress = "offsets",
    outputs: float = 0.0,
    steps: int = 0,
) -> Backlog:
    item = Consumption(topic=TOPIC, group="run.reward", operator="reward", progress=progress)
    return Backlog(
        consumption=item,
        lag={P0: 0, P1: 0, **waiting},
        committed=committed or {},
        assigned=assigned,
        waiting={p: n for p, n in waiting.items() if p in assigned},
        outputs=outputs,
        steps=steps,
    )


def readiness() -> Readiness:
    item = Consumption(topic=TOPIC, group="run.reward", operator="reward", progress="offsets")
    return Readiness(SETTINGS, consumption=item, now=0.0)


def test_not_ready_before_the_log_has_answered_and_says_what_it_said() -> None:
    ready = readiness()
    assert ready.reasons(1.0) == ["the log has not answered yet"]
    ready.unanswered("127.0.0.1:1 does not answer")
    assert ready.reasons(1.0) == ["the log has not answered yet: 127.0.0.1:1 does not answer"]
    ready.observe(backlog({}), 2.0)
    assert ready.reasons(2.0) == []


def test_an_operator_that_reads_nothing_of_others_is_ready_once_the_log_answers() -> None:
    ready = Readiness(SETTINGS, consumption=None, now=0.0)
    assert ready.reasons(0.0) != []
    ready.answered(1.0)
    assert ready.reasons(1000.0) == []


def test_a_log_that_is_away_is_a_reason_only_after_a_while() -> None:
    ready = readiness()
    ready.observe(backlog({}), 0.0)
    ready.unanswered("nobody there")
    assert ready.reasons(29.0) == []
    assert ready.reasons(30.0) == ["the log has not answered for 30 s: nobody there"]
    ready.observe(backlog({}), 31.0)
    assert ready.reasons(90.0) == []


def test_records_that_wait_without_progress_are_named_with_their_number_and_since_when() -> None:
    ready = readiness()
    ready.observe(backlog({P0: 3, P1: 5}, committed={P0: 7}), 0.0)
    ready.observe(backlog({P0: 3, P1: 4}, committed={P0: 7, P1: 1}), 99.0)
    assert ready.reasons(99.0) == []
    (reason,) = ready.reasons(100.0)
    assert reason.startswith(f"{P0}: 3 records wait with no progress for 100 s, since ")
    assert reason.endswith("Z (group run.reward)")
    ready.observe(backlog({P0: 2, P1: 4}, committed={P0: 8, P1: 1}), 101.0)
    assert ready.reasons(102.0) == []


def test_an_empty_partition_is_not_stuck_and_its_clock_begins_with_the_first_record() -> None:
    ready = readiness()
    ready.observe(backlog({P0: 0}), 0.0)
    ready.observe(backlog({P0: 0}), 500.0)
    ready.observe(backlog({P0: 1}), 510.0)
    assert ready.reasons(599.0) == []
    assert len(ready.reasons(600.0)) == 1


def test_a_rewind_is_no_progress() -> None:
    ready = readiness()
    for second in range(0, 120, 10):  # committed never moves, however often it is polled
        ready.observe(backlog({P0: 9}, committed={P0: 4}, outputs=0.0, steps=second), float(second))
    assert len(ready.reasons(110.0)) == 1


def test_an_operator_that_works_long_on_what_it_took_gets_on_by_what_it_writes() -> None:
    ready = readiness()
    for second in range(0, 300, 10):
        ready.observe(backlog({P0: 9}, progress="output", outputs=float(second)), float(second))
    assert ready.reasons(300.0) == []
    assert ready.reasons(390.0)[0].startswith(f"{TOPIC}: 9 records wait with no progress for 100 s")


def test_an_operator_with_its_own_offsets_gets_on_by_its_steps() -> None:
    ready = readiness()
    for second in range(0, 300, 10):
        ready.observe(backlog({P0: 9}, progress="steps", steps=second), float(second))
    assert ready.reasons(300.0) == []
    assert len(ready.reasons(390.0)) == 1


def test_without_a_partition_it_is_a_standby_after_a_while_and_ready_while_its_group_gets_on() -> None:
    ready = readiness()
    nothing: frozenset[TopicPartition] = frozenset()
    seen = backlog({P0: 9}, assigned=nothing, committed={P0: 1})
    ready.observe(seen, 0.0)
    assert ready.reasons(19.0) == [f"{TOPIC}: no partition is assigned to this process yet (group run.reward)"]
    assert ready.reasons(20.0) == []
    ready.observe(replace(seen, committed={P0: 2}), 50.0)
    assert ready.reasons(149.0) == []
    (reason,) = ready.reasons(150.0)
    assert "no partition is assigned to this process, and 9 records wait with no progress for 100 s" in reason


def test_a_partition_that_was_given_away_takes_its_clock_with_it() -> None:
    ready = readiness()
    ready.observe(backlog({P0: 3}, committed={P0: 7}), 0.0)
    ready.observe(backlog({P0: 3}, committed={P0: 7}, assigned=frozenset({P1})), 99.0)
    assert ready.reasons(150.0) == []


@pytest.fixture
def health() -> Health:
    pulse = Pulse(state="running", beat_at=1000.0)
    ready = Readiness(SETTINGS, consumption=None, now=1000.0)
    ready.answered(1000.0)
    return Health(pulse, ready, SETTINGS, stopping=lambda: "", clock=lambda: 1010.0)


def test_live_and_ready_while_the_loop_makes_steps(health: Health) -> None:
    assert (health.not_live(), health.not_ready()) == ([], [])
    health.pulse.beat_at = 949.0
    assert health.not_live() == ["no step has finished for 61.0 s (limit 60 s)"]
    assert health.not_ready() == health.not_live()


def test_a_process_that_starts_is_neither(health: Health) -> None:
    health.pulse.state = "starting"
    assert health.not_live() == ["starting for 10 s"]
    assert health.not_ready() == ["starting for 10 s"]


def test_a_process_that_was_asked_to_stop_lives_on_but_is_not_ready(health: Health) -> None:
    stopping = Health(health.pulse, health.readiness, SETTINGS, stopping=lambda: "SIGTERM", clock=health.clock)
    assert (stopping.not_live(), stopping.not_ready()) == ([], ["stopping: SIGTERM"])
    health.pulse.state = "draining"
    assert (health.not_live(), health.not_ready()) == ([], ["draining: the run ended"])
