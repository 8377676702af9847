"""Dead letters of a run, from the fault to the fate: all operators over the memory log, under a virtual clock."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.scripted import Answer
from laminar.schemas import records as r
from laminar.streams.dead import Desk, Outcome
from laminar.streams.deadline import Deadline
from laminar.streams.log import OutRecord
from tests.support.crew import Crew


def decide(crew: Crew, choose: Callable[[str], bool] = lambda _: True, action: str = "retry") -> list[Outcome]:
    """Settle every open letter about a chosen member."""
    with closing(Desk(crew.log, crew.codec, "run", by="ada@lab", deadline=Deadline.after(30, "desk"))) as desk:
        entries = [
            e
            for e in desk.register.entries.values()
            if e.state == "open" and choose((e.letter.trajectory_ids or ("",))[0])
        ]
        return [desk.retry(e) if action == "retry" else desk.drop(e) for e in entries]


def balanced(crew: Crew) -> dict[str, object]:
    ledger = crew.ledger()
    assert ledger.violations == ()
    return ledger.as_json()


def failing(*members: str) -> Callable[[EngineRequest], Answer]:
    """An engine that can never finish these members of any group."""

    def script(request: EngineRequest) -> Answer:
        bad = request.trajectory_id.rsplit("/", 1)[1] in members
        return Answer(ids=(5, 6, 7), fail_times=99 if bad else 0)

    return script


def test_b14_a_member_that_fails_time_and_again_is_a_dead_letter_and_its_group_closes(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.answer = failing("2")
    crew.go(crew.ended)
    letters = crew.letters()
    assert letters
    assert {letter.attempt for letter in letters} == {3}
    assert all(letter.trajectory_ids[0].endswith("/2") for letter in letters)
    assert len(crew.fates()) == 3 * 2 * 3
    assert balanced(crew)["dead"] == len(letters)


def test_a_retried_member_of_an_open_group_counts_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, groups_per_step=3)
    crew.answer = lambda request: Answer(
        ids=(5, 6, 7),
        fail_times=99 if request.trajectory_id.endswith("/2") else 0,
        hang_at=2 if request.trajectory_id.endswith("/3") else None,
    )
    crew.go(lambda: len(crew.letters()) >= 3)
    open_members = [letter.trajectory_ids[0] for letter in crew.letters()]
    assert all(outcome.done for outcome in decide(crew))
    crew.answer = lambda request: Answer(ids=(5, 6, 7))
    crew.running["rollout-0"].close()  # the hanging members go to its successor, the retried ones wait for one too
    del crew.running["rollout-0"]
    crew.start("rollout-0")
    crew.go(crew.ended, seconds=120)
    assert [crew.fates()[one] for one in open_members] == ["trained"] * len(open_members)
    assert balanced(crew)["dead"] == 0


def test_a_member_that_comes_back_after_its_group_was_consumed_is_dropped_with_that_reason(tmp_path: Path) -> None:
    crew = Crew(tmp_path, steps=40, rows=100)
    crew.answer = failing("2")
    crew.go(lambda: crew.steps_done() >= 2)
    crew.answer = lambda request: Answer(ids=(5, 6, 7))
    crew.start("rollout-0")
    trained = {one.rsplit("/", 1)[0] for one in crew.fates()}
    late = [m for letter in crew.letters() for m in letter.trajectory_ids if m.rsplit("/", 1)[0] in trained]
    decide(crew)
    crew.go(crew.ended, seconds=120)
    assert {crew.fates().get(one) for one in late} == {"group_closed"}
    ledger = balanced(crew)
    assert ledger["dead"] == 0
    assert ledger["dropped"] == {"group_closed": len(late)}


@pytest.mark.parametrize("restarted", [False, True])
def test_groups_that_died_whole_are_trained_on_after_a_retry(restarted: bool, tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.broken_reward = True
    crew.go(lambda: len(crew.letters()) >= 2 * 4)
    crew.broken_reward = False
    members = {m for letter in crew.letters() for m in letter.trajectory_ids}
    decide(crew)
    if restarted:
        for instance in list(crew.running):
            crew.start(instance)
    crew.go(crew.ended, seconds=120)
    assert {crew.fates().get(one) for one in members} <= {"trained", None}
    assert "trained" in {crew.fates().get(one) for one in members}
    assert balanced(crew)["dead"] == 0


def test_a_finite_run_that_died_whole_ends_and_its_retry_is_trained_by_the_resumed_one(tmp_path: Path) -> None:
    crew = Crew(tmp_path, epochs=1, rows=4, steps=9)
    crew.broken_reward = True
    crew.go(crew.ended, seconds=120)
    assert balanced(crew)["dead"] == 4 * 4
    crew.broken_reward = False
    assert len(decide(crew)) == 16
    for instance in list(crew.running):
        crew.start(instance)
    crew.go(lambda: crew.ended() and crew.steps_done() == 2, seconds=120)
    ledger = balanced(crew)
    assert (ledger["trained"], ledger["dead"]) == (16, 0)


def test_evaluation_answers_that_died_come_back_while_their_round_is_open(tmp_path: Path) -> None:
    crew = Crew(tmp_path, eval_rows=3)
    crew.broken_reward = True
    crew.answer = lambda request: Answer(ids=(5, 6), hang_at=1 if "/2/0" in request.trajectory_id else None)
    crew.go(lambda: len(crew.letters()) >= 2)
    crew.broken_reward = False
    decide(crew)
    crew.answer = lambda request: Answer(ids=(5, 6))
    crew.start("rollout-0")
    crew.go(crew.ended, seconds=200)
    assert [(e.round, e.n) for e in crew.read("training.steps", r.Evaluation)] == [(0, 3), (3, 3)]
    balanced(crew)


def test_a_member_that_dies_again_has_one_letter_that_counts(tmp_path: Path) -> None:
    crew = Crew(tmp_path, steps=40, rows=100)
    crew.answer = failing("2")
    crew.go(lambda: len(crew.letters()) >= 2)
    again = {m for letter in crew.letters() for m in letter.trajectory_ids}
    decide(crew)
    crew.go(crew.ended, seconds=120)
    letters = [m for letter in crew.letters() for m in letter.trajectory_ids]
    assert {letters.count(m) for m in again} == {2}
    ledger = balanced(crew)
    assert ledger["dead"] == len(set(letters))
    attempts = [e.attempt for e in crew.read("trajectories.partial", r.TrajectoryEnded) if e.finish is None]
    assert max(attempts) >= 2


def test_dropped_letters_stay_fates(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.answer = failing("2")
    crew.go(crew.ended)
    dead = balanced(crew)["dead"]
    assert all(outcome.done and "stay dead" in outcome.text for outcome in decide(crew, action="drop"))
    assert balanced(crew)["dead"] == dead


def test_a_result_that_nobody_can_read_closes_its_group_and_comes_back_when_it_can_be_read(tmp_path: Path) -> None:
    crew = Crew(tmp_path, steps=4)
    crew.running.pop("reward-0").close()
    crew.go(lambda: len(crew.read("trajectories.completed", r.CompletedTrajectory)) >= 12)
    good = crew.read("trajectories.completed", r.CompletedTrajectory)
    victim = next(one for one in good if one.member == 1)
    crew.write(OutRecord(topic="trajectories.completed", key=victim.group_id.encode(), value=b"\xc3\x01 rubbish"))
    crew.start("reward-0")
    crew.go(crew.ended, seconds=120)
    (letter,) = crew.letters()
    assert (letter.kind, letter.trajectory_ids, letter.key) == ("DecodeError", (), victim.group_id.encode())
    ledger = balanced(crew)
    assert sum(ledger["dropped"].values()) + ledger["trained"] == len(crew.fates())  # type: ignore[attr-defined,operator]


@pytest.mark.parametrize("seed", range(int(os.environ.get("DEAD_LETTER_SEEDS", "4"))))
def test_whoever_dies_is_retried_or_dropped_and_restarted_at_any_moment_has_one_fate(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    crew = Crew(tmp_path, epochs=2, rows=8, steps=99, eval_rows=2)

    def script(request: EngineRequest) -> Answer:
        ids = tuple(rng.randrange(5, 200) for _ in range(rng.choice([2, 5, 20])))
        return Answer(ids=ids, fail_times=rng.choice([0, 0, 0, 0, 9]))

    crew.answer = script
    for _ in range(40):
        crew.broken_reward = rng.random() < 0.3
        crew.rest(rng.choice([0.2, 0.5, 1.0]))
        if rng.random() < 0.3:
            crew.start(rng.choice(list(crew.running)))
        if rng.random() < 0.5:
            chosen = {m for letter in crew.letters() for m in letter.trajectory_ids if rng.random() < 0.5}
            decide(crew, chosen.__contains__, action=rng.choice(["retry", "retry", "retry", "drop"]))
    crew.broken_reward, crew.answer = False, lambda _: Answer(ids=(5, 6, 7))
    crew.start("rollout-0")
    while decide(crew):
        crew.rest(10.0)
    if crew.ended():  # and some were given back since
        for instance in list(crew.running):
            crew.start(instance)
    crew.go(crew.ended, seconds=300)
    ledger = crew.ledger()
    assert ledger.violations == ()
    assert ledger.admitted == 2 * 8 * 4 + 2 * 2
    fates = ledger.trained + sum(ledger.dropped.values()) + ledger.dead + sum(ledger.in_flight.values())
    assert fates == ledger.admitted
    assert ledger.trained > 0
