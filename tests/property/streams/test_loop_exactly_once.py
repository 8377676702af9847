"""Two processes run the same loop while everything goes wrong that can; every input ends exactly once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import Aborted, Fenced, LaminarError, Retryable, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.log import OutRecord, TopicPartition
from laminar.streams.loop import Loop
from laminar.streams.memory import MemoryBroker, MemoryLog, Point
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Result
from tests.support import sample

CODEC = Codec()
IN, OUT = "trajectories.completed", "trajectories.scored"


class Crash(BaseException):
    """The process dies here."""


class Faults:
    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng = rng
        self.rate = rate

    def at(self, point: Point, transactional_id: str) -> None:
        if self.rng.random() >= self.rate:
            return
        if point == "before_commit":
            raise self.rng.choice([Aborted("no"), Crash()])
        raise self.rng.choice([Unavailable("no answer"), Crash()] if point == "after_commit" else [Crash()])

    def late(self, who: str, partition: TopicPartition) -> bool:
        return self.rng.random() < self.rate

    def away(self) -> bool:
        return False


class Reluctant:
    """A worker that ends calls in a random order, some with an exception."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.calls: dict[int, r.Record] = {}

    def submit(self, ticket: int, record: r.Record) -> None:
        self.calls[ticket] = record

    def collect(self) -> list[Result]:
        return [self.end(ticket) for ticket in list(self.calls) if self.rng.random() < 0.4]

    def end(self, ticket: int) -> Result:
        record = self.calls.pop(ticket)
        assert isinstance(record, r.CompletedTrajectory)
        if record.text == "poison" or self.rng.random() < 0.1:
            return Result(ticket=ticket, error=ValueError("not now"))
        return Result(ticket=ticket, outputs=(sample.scored(record),))

    def cancel(self, ticket: int) -> None:
        self.calls.pop(ticket)

    def close(self) -> None:
        self.calls.clear()


class Later:
    """A transaction beside the step: it is made when somebody looks for it, some looks after it was begun."""

    def __init__(self, call: Callable[[], None], looks: int) -> None:
        self.call = call
        self.looks = looks
        self.error: BaseException | None = None

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0 or (self.looks == 0 and self.wait(0.0))

    def wait(self, timeout_s: float) -> bool:
        self.looks = 0
        try:
            self.call()
        except BaseException as error:  # noqa: BLE001 - raised again by result
            self.error = error
        self.call = lambda: None
        return True

    def result(self) -> None:
        if self.error is not None:
            raise self.error


def inputs(rng: random.Random, n: int) -> Iterable[OutRecord]:
    for index in range(n):
        text = "poison" if rng.random() < 0.1 else "abc"
        made = outgoing(CODEC, sample.completed(sample.prompt(index), text=text))
        if rng.random() < 0.1:
            made = OutRecord(topic=IN, key=made.key, value=b"rubbish")
        yield made


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_s3_s5_s9_s10_whatever_fails_every_input_ends_exactly_once(seed: int, beside: bool) -> None:
    rng = random.Random(seed)
    now = [1_000.0]
    broker = MemoryBroker(lambda: now[0])
    log = MemoryLog(clock=lambda: now[0], broker=broker)
    log.create_topics(topic_specs({IN: 3, OUT: 2}))
    sent = list(inputs(rng, 40))
    with log.producer("writer").transaction() as tx:
        for record in sent:
            tx.send(record)
    faults = Faults(rng, 0.15)

    def process(index: int) -> Loop:
        handle = MemoryLog(clock=lambda: now[0], broker=broker, faults=faults, session_timeout_s=5.0)
        return Loop(
            log=handle,
            codec=CODEC,
            name="reward",
            group="run.reward",
            instance=f"reward-{index}",
            transactional_id=f"run.reward-{index}",
            topics=[IN],
            worker=Reluctant(rng),
            max_in_hand=rng.choice([2, 8, 64]),
            linger_s=rng.choice([0.0, 0.3]),
            background=(lambda call: Later(call, rng.randrange(1, 6))) if beside else None,
        )

    loops = [process(0), process(1)]
    zombies: list[Loop] = []
    for round_ in range(3_000):
        if round_ == 1_500:
            faults.rate = 0.0
        if round_ > 1_500 and not any(log.lag("run.reward", IN).values()):
            break
        now[0] += rng.choice([0.01, 0.1, 0.5])
        which = rng.randrange(2)
        if rng.random() < 0.2:
            continue  # a paused process: its session may run out meanwhile
        if faults.rate and rng.random() < 0.01:
            now[0] += 6.0  # nobody polls for longer than a session
        if zombies and rng.random() < 0.3:
            zombie = rng.choice(zombies)
            try:
                zombie.step(now[0])
            except (LaminarError, Crash):
                zombies.remove(zombie)
        try:
            loops[which].step(now[0])
        except (Retryable, Fenced, Crash) as error:
            if isinstance(error, Crash) and rng.random() < 0.5:
                zombies.append(loops[which])  # it was only thought dead, and wakes up later
            elif not isinstance(error, Crash):
                loops[which].close()
            loops[which] = process(which)

    assert not any(log.lag("run.reward", IN).values())
    deadline = Deadline.after(10, "read")
    outputs = [CODEC.decode(record.value or b"") for record in read_topic(log, OUT, deadline)]
    letters = [CODEC.decode(record.value or b"") for record in read_topic(log, "dead.letters", deadline)]
    ends = Counter(
        [one.trajectory.group_id for one in outputs if isinstance(one, r.ScoredTrajectory)]
        + [(one.key or b"").decode() for one in letters if isinstance(one, r.DeadLetter)]
    )
    assert ends == Counter((record.key or b"").decode() for record in sent)
    assert set(ends.values()) == {1}
    poisoned = {(record.key or b"").decode() for record in sent if record.value == b"rubbish"}
    assert poisoned <= {(one.key or b"").decode() for one in letters if isinstance(one, r.DeadLetter)}
