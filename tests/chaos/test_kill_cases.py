"""What is killed, silenced or late on a real deployment: a broker, ``laminar run``, a process for every operator.

One run goes through all of it; each test looks at one part of what the topics say in the end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from laminar.operators.repack.fold import PartialPool
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.open import open_log
from laminar.streams.reading import Tail, decoded, read_topic
from laminar.streams.topics import outgoing
from tests.chaos.soak.deployment import Deployment
from tests.chaos.soak.evidence import Evidence, gather, wrong_tokens
from tests.chaos.soak.observation import Observation

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

POISON = "0/4/2"
WAIT_S = 240.0
T = TypeVar("T")


@dataclass
class Story:
    """What was done, and what the topics said afterwards."""

    died_with: frozenset[str] = frozenset()
    """What rollouts that the poisonous trajectory ended had in hand."""
    killed: str = ""
    killed_with: dict[str, int] = field(default_factory=dict)
    """Trajectory -> tokens on the log at the kill."""
    silenced: str = ""
    silenced_with: frozenset[str] = frozenset()
    late: r.CompletedTrajectory | None = None
    evidence: Evidence | None = None
    topics: dict[str, list[object]] = field(default_factory=dict)

    def of(self, topic: str, kind: type[T]) -> list[T]:
        return [one for one in self.topics[topic] if isinstance(one, kind)]


class Stage:
    """The running deployment, watched."""

    def __init__(self, deployment: Deployment, log: Log) -> None:
        self.deployment, self.log, self.codec = deployment, log, Codec()
        self.seen = Observation(deployment)
        self._tail = Tail(log, ["trajectories.partial"])
        self._pool = PartialPool()

    def look(self) -> None:
        self.seen.look()
        while records := self._tail.poll():
            for raw, event in decoded(records, self.codec):
                self._pool.apply(event, raw.source, raw.offset)

    def until(self, holds: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"{name}: not within {WAIT_S} s\n{self.deployment.output()}"
            assert self.deployment.running, self.deployment.output()
            self.look()
            time.sleep(0.05)

    def read(self, topic: str) -> list[object]:
        records = read_topic(self.log, topic, Deadline.after(60, f"read {topic}"))
        return [record for _, record in decoded(records, self.codec)]

    def held(self, rollout: str) -> dict[str, int]:
        """What a rollout owns, with the number of tokens on the log."""
        self.look()
        return {one.trajectory_id: one.n_response for one in self._pool.alive.values() if one.owner[0] == rollout}

    def alive(self) -> frozenset[str]:
        """Trajectories that have not ended."""
        return frozenset(self._pool.alive)

    def calm(self) -> bool:
        """Whether nothing is left that an owner has died with: one more death might make it a suspect."""
        return not any(one.deaths for one in self._pool.alive.values())

    def close(self) -> None:
        self._tail.close()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    deployment = Deployment(
        tmp_path_factory.mktemp("kills"),
        rewards=1,
        repacks=1,
        script={"deadly": [POISON]},
        settings=("operators.prompts.shuffle=false",),
    )
    story = Story()
    try:
        deployment.open()
        deployment.start()
        deadline = time.monotonic() + WAIT_S
        while not (deployment.run_folder / "config.yaml").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        config = deployment.config()
        with closing(open_log(config.log, run_id=config.name)) as log:
            while "training.steps" not in log.topics():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            stage = Stage(deployment, log)
            _tell(story, stage)
            stage.close()
            assert deployment.stop() == 128 + signal.SIGTERM
            story.evidence = gather(config)
            for topic in ("trajectories.partial", "trajectories.completed", "dead.letters", "training.steps"):
                story.topics[topic] = stage.read(topic)
        yield story
    finally:
        deployment.close()


def _tell(story: Story, stage: Stage) -> None:
    deployment = stage.deployment
    stage.until(lambda: bool(stage.read("dead.letters")), "the poisonous trajectory is buried")
    stage.until(lambda: stage.seen.steps_seen >= 1, "a step is made")

    stage.until(stage.calm, "what was beside it is finished")
    moved = [one for one in stage.read("trajectories.partial") if isinstance(one, r.TrajectoryMoved)]
    story.died_with = frozenset(one.trajectory_id for one in moved if one.reason == "dead")
    story.killed = "rollout-1"
    _stop_with(stage, story.killed, lambda held: sum(n > 0 for n in held.values()) >= 4)
    story.killed_with = {one: n for one, n in stage.held(story.killed).items() if n > 0}
    deployment.send(story.killed, signal.SIGKILL)

    stage.until(lambda: not story.killed_with.keys() & stage.alive(), "what the killed one had begun is finished")
    stage.until(stage.calm, "what the killed one had is finished")
    story.silenced = "rollout-0"
    pid = _stop_with(stage, story.silenced, lambda held: len(held) >= 12)
    story.silenced_with = frozenset(stage.held(story.silenced))
    step = stage.seen.step
    stage.until(lambda: not story.silenced_with & stage.alive(), "others have finished what it held")
    stage.until(lambda: stage.seen.step >= step + 2, "steps are made without it")
    if deployment.pid(story.silenced) == pid:
        deployment.send(story.silenced, signal.SIGCONT)

    done = [one for one in stage.read("trajectories.completed") if isinstance(one, r.CompletedTrajectory)]
    again = next(one for one in done if one.attempt > 0 and one.prompt.purpose == "train")
    partial = stage.read("trajectories.partial")
    first = next(
        one for one in partial if isinstance(one, r.TrajectoryStarted) and one.trajectory_id == again.trajectory_id
    )
    story.late = replace(again, attempt=0, rollout_id=first.rollout_id)
    end = r.TrajectoryEnded(
        trajectory_id=again.trajectory_id, attempt=0, finish=again.finish, n_tokens=again.response.n_tokens, at_ms=0
    )
    with stage.log.producer("a-zombie").transaction() as tx:
        tx.send(outgoing(stage.codec, story.late))
        tx.send(outgoing(stage.codec, end))
    step = stage.seen.step
    stage.until(lambda: stage.seen.step >= step + 2, "steps are made after the late result")


def _stop_with(stage: Stage, rollout: str, enough: Callable[[dict[str, int]], bool]) -> int:
    """SIGSTOP at a moment at which it holds enough; the process."""
    deadline = time.monotonic() + WAIT_S
    while True:
        stage.until(lambda: enough(stage.held(rollout)), f"{rollout} has enough in hand")
        pid = stage.deployment.send(rollout, signal.SIGSTOP)
        time.sleep(0.5)
        if pid is not None and enough(stage.held(rollout)):
            return pid
        stage.deployment.send(rollout, signal.SIGCONT)
        assert time.monotonic() < deadline


def test_everybody_has_one_fate_and_every_answer_is_the_script_s(story: Story) -> None:
    assert story.evidence is not None
    ledger = story.evidence.ledger
    assert ledger.violations == ()
    assert ledger.balanced
    assert story.evidence.wrong == ()
    assert ledger.dead == 1


def test_a5_what_a_silent_rollout_had_taken_is_finished_by_others(story: Story) -> None:
    assert len(story.silenced_with) >= 12
    owners = {one.trajectory_id: one for one in story.of("trajectories.completed", r.CompletedTrajectory)}
    moved = [m for m in story.of("trajectories.partial", r.TrajectoryMoved) if m.from_rollout == story.silenced]
    adopted = {m.trajectory_id for m in moved if m.reason == "dead"} & story.silenced_with
    assert len(adopted) >= 4
    assert all(owners[one].attempt > 0 for one in adopted)


def test_a6_a_killed_engine_s_partials_are_resumed_from_the_tokens_that_the_log_has(story: Story) -> None:
    moves = [
        one
        for one in story.of("trajectories.partial", r.TrajectoryMoved)
        if one.from_rollout == story.killed and one.reason == "dead" and one.trajectory_id in story.killed_with
    ]
    resumed = [one for one in moves if one.n_tokens]  # the others' policy version was not to be had any more
    assert resumed
    assert all(one.n_tokens >= story.killed_with[one.trajectory_id] for one in resumed)
    done = {one.trajectory_id: one for one in story.of("trajectories.completed", r.CompletedTrajectory)}
    for move in moves:
        assert done[move.trajectory_id].attempt >= move.attempt
        assert wrong_tokens(done[move.trajectory_id]) == []


def test_b12_a_late_result_of_an_older_attempt_is_ignored_and_counted(story: Story) -> None:
    assert story.late is not None
    assert story.evidence is not None
    late = story.late.trajectory_id
    trained = [one for step in story.of("training.steps", r.TrainingStep) for one in step.trained if one == late]
    assert len(trained) <= 1
    assert story.evidence.ledger.late >= 1


def test_a_poisonous_trajectory_is_buried_and_none_of_those_beside_it(story: Story) -> None:
    (letter,) = story.of("dead.letters", r.DeadLetter)
    (poison,) = letter.trajectory_ids
    assert poison.endswith(f"/{POISON}")
    assert letter.kind == "OwnersDied"
    done = {one.trajectory_id for one in story.of("trajectories.completed", r.CompletedTrajectory)}
    beside = story.died_with - {poison}
    assert beside
    assert beside <= done
    assert poison not in done
