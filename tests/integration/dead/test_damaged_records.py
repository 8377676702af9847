"""Records of every kind of damage on every topic while all operators work: dead letters where a fate is to be settled,
otherwise passed over with a warning now and then; nothing stops (A14, S6, S19)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from laminar.operators.rollout.engines.scripted import Answer
from laminar.schemas import records as r
from laminar.streams.reading import skipped
from laminar.streams.topics import TOPICS
from tests.support.crew import Crew
from tests.support.damage import SETTLED, damaged, strangers


@pytest.mark.parametrize("topic", list(TOPICS))
def test_a14_s6_damage_on_any_topic_stops_nothing(topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    skipped.clear()
    crew = Crew(tmp_path, eval_rows=2)
    broken = damaged(topic, crew.codec, large=topic in ("trajectories.completed", "dead.letters"))
    crew.write(*broken.values())
    crew.go(lambda: crew.steps_done() >= 1)
    crew.write(*broken.values())
    for instance in list(crew.running):  # whoever folds a topic from its beginning comes by all of it again
        crew.start(instance)
    crew.write(*broken.values())
    crew.go(crew.ended, seconds=120)
    crew.rest(1.0)
    assert crew.steps_done() == 3
    assert [e.n for e in crew.read("training.steps", r.Evaluation)] == [2, 2]
    letters = crew.letters()
    if topic in SETTLED:
        assert len(letters) == 3 * len(broken)
        assert {letter.topic for letter in letters} == {topic}
        assert all(letter.error and letter.offset >= 0 for letter in letters)
        assert len({letter.offset for letter in letters}) == 3 * len(broken)
    else:
        assert letters == []
        assert skipped[topic] >= 15  # commands count from a rollout's first heartbeat on
        lines = [line for line in caplog.messages if line.startswith(topic) and ": skipped: " in line]
        assert 1 <= len(lines) <= 4
    assert crew.ledger().violations == ()


def test_a14_a_heartbeat_without_any_room_takes_no_orphans(tmp_path: Path) -> None:
    crew = Crew(tmp_path, group_size=2)
    crew.answer = lambda request: Answer(ids=(5, 6, 7), hang_at=1)
    crew.go(lambda: len(crew.read("trajectories.partial", r.TrajectoryStarted)) >= 2)
    crew.running.pop("rollout-0").close()
    for _ in range(5):
        crew.write(*(record for record in strangers() if isinstance(record, r.RolloutStatus)))
        crew.rest(1.0)
    crew.answer = lambda request: Answer(ids=(5, 6, 7))
    crew.start("rollout-0")
    crew.go(crew.ended, seconds=120)
    assert crew.ledger().violations == ()


def test_a14_sound_records_that_make_no_sense_here_stop_nothing(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.write(*strangers())
    crew.go(lambda: crew.steps_done() >= 1)
    crew.write(*strangers())
    for instance in list(crew.running):
        crew.start(instance)
    crew.write(*strangers())
    crew.go(crew.ended, seconds=120)
    assert crew.steps_done() == 3
