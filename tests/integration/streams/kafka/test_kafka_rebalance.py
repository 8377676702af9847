"""Partitions that change hands while work on them is in hand, in both group protocols."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import LaminarError
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import Consumer, RebalanceCallback, TopicPartition
from laminar.streams.loop import Loop
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing
from laminar.streams.worker import Function, Inline, Result, Worker
from tests.integration.streams.log_contract.driving import WAIT_S
from tests.support import sample
from tests.support.broker import SESSION_S
from tests.support.reward_group import reward_topics, trajectories

pytestmark = pytest.mark.kafka

IN, OUT = "trajectories.completed", "trajectories.scored"
CODEC = Codec()
Make = Callable[..., KafkaLog]
Unique = Callable[[str], str]
BOTH = pytest.mark.parametrize("protocol", ["consumer", "classic"])
POLL_S = 3.0
"""Poll interval and session of the members here."""


class Watched:
    """A log that keeps the rebalances of its consumers: ("+" or "-", partitions)."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self.seen: list[tuple[str, frozenset[TopicPartition]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> Consumer:
        def assigned(partitions: frozenset[TopicPartition]) -> None:
            self.seen.append(("+", partitions))

        def revoked(partitions: frozenset[TopicPartition]) -> None:
            self.seen.append(("-", partitions))
            if on_revoke is not None:
                on_revoke(partitions)

        return self._log.consumer(group, topics, instance=instance, on_assign=assigned, on_revoke=revoked)


class Threads:
    """A worker that runs its calls in threads."""

    def __init__(self, function: Function, concurrency: int = 4) -> None:
        self.called: Counter[str] = Counter()
        self._function = function
        self._pool = ThreadPoolExecutor(concurrency)
        self._futures: dict[int, Future[list[r.Record]]] = {}

    def submit(self, ticket: int, record: r.Record) -> None:
        assert isinstance(record, r.CompletedTrajectory)
        self.called[record.trajectory_id] += 1
        self._futures[ticket] = self._pool.submit(lambda: list(self._function(record)))

    def collect(self) -> list[Result]:
        ended = [ticket for ticket, future in self._futures.items() if future.done()]
        return [Result(ticket=ticket, outputs=tuple(self._futures.pop(ticket).result())) for ticket in ended]

    def cancel(self, ticket: int) -> None:
        self._futures.pop(ticket).cancel()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Group:
    """Loops of one group over one topic of two partitions."""

    def __init__(self, make_log: Make, run: str, protocol: str) -> None:
        self._make_log = make_log
        self._protocol = protocol
        self.run = run
        self.log = make_log()
        self.logs: list[Watched] = []
        self.loops: list[Loop] = []

    def join(self, worker: Worker, **settings: Any) -> Loop:
        handle = self._make_log(group_protocol=self._protocol, session_timeout_s=POLL_S, poll_interval_s=POLL_S)
        self.logs.append(Watched(handle))
        instance = f"reward-{len(self.loops)}"
        loop = Loop(
            log=self.logs[-1],
            codec=CODEC,
            name="reward",
            group=f"{self.run}.reward",
            instance=instance,
            transactional_id=f"{self.run}.{instance}",
            topics=[IN],
            worker=worker,
            **settings,
        )
        self.loops.append(loop)
        return loop

    def write(self, records: Sequence[r.Record], partition: int, by: str) -> None:
        with self.log.producer(by).transaction() as tx:
            for record in records:
                tx.send(outgoing(CODEC, record, partition=partition))

    def step_until(self, condition: Callable[[], bool], what: str, loops: Sequence[Loop] | None = None) -> None:
        deadline = Deadline.after(2 * WAIT_S, what)
        while not condition():
            deadline.check(str([sorted(map(str, x._consumer.assignment())) for x in self.loops]))
            for loop in self.loops if loops is None else loops:
                loop.step(time.time())
            time.sleep(0.002)

    def for_a_while(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.step_until(lambda: time.monotonic() > end, "a while")

    def shared(self) -> bool:
        return [len(loop._consumer.assignment()) for loop in self.loops] == [1] * len(self.loops)

    def scored(self) -> list[str]:
        found = [CODEC.decode(x.value or b"") for x in read_topic(self.log, OUT, Deadline.after(WAIT_S, "read"))]
        return sorted(x.trajectory.trajectory_id for x in found if isinstance(x, r.ScoredTrajectory))

    def finished(self) -> bool:
        return not any(self.log.lag(f"{self.run}.reward", IN).values())


@pytest.fixture
def join(make_log: Make, unique: Unique) -> Iterator[Callable[[str], Group]]:
    groups: list[Group] = []

    def make(protocol: str) -> Group:
        groups.append(Group(make_log, unique("run"), protocol))
        return groups[-1]

    with reward_topics(make_log(), 2):
        yield make
        for group in groups:
            for loop in group.loops:
                loop.close()


def score(record: r.Record) -> list[r.Record]:
    assert isinstance(record, r.CompletedTrajectory)
    return [sample.scored(record)]


def ids(records: Sequence[r.CompletedTrajectory]) -> list[str]:
    return sorted(x.trajectory_id for x in records)


@BOTH
def test_s10_scaling_to_two_commits_what_is_finished_and_doubles_nothing(
    join: Callable[[str], Group], protocol: str, unique: Unique
) -> None:
    group = join(protocol)
    gate = threading.Event()
    records = trajectories(40)
    last = {records[19].trajectory_id, records[39].trajectory_id}

    def held(record: r.Record) -> list[r.Record]:
        assert isinstance(record, r.CompletedTrajectory)
        if record.trajectory_id in last:
            assert gate.wait(WAIT_S)
        return score(record)

    first_worker, second_worker = Threads(held), Threads(score)
    first = group.join(first_worker, linger_s=1e9, max_in_hand=200, revoke_s=0.2)
    for partition in range(2):
        group.write(records[20 * partition : 20 * partition + 20], partition, unique("writer"))
    group.step_until(lambda: first.in_hand == 40 and len(first._calls) == 2, "all but two are finished")
    assert group.scored() == []
    second = group.join(second_worker)
    group.step_until(group.shared, "one partition each")
    (moved,) = second._consumer.assignment()
    assert second_worker.called.keys() <= last
    first._linger_s = 0.0
    gate.set()
    group.step_until(group.finished, "everything is committed")
    assert group.scored() == ids(records)
    assert second_worker.called == {records[20 * moved.partition + 19].trajectory_id: 1}
    assert set(first_worker.called.values()) == {1}


@BOTH
def test_s1_work_that_never_ends_delays_a_revocation_by_its_deadline_and_no_more(
    join: Callable[[str], Group], protocol: str, unique: Unique
) -> None:
    group = join(protocol)
    gate = threading.Event()

    def stuck(record: r.Record) -> list[r.Record]:
        assert gate.wait(2 * WAIT_S)
        return score(record)

    records = trajectories(20)
    first = group.join(Threads(stuck), revoke_s=1.0)
    for partition in range(2):
        group.write(records[10 * partition : 10 * partition + 10], partition, unique("writer"))
    group.step_until(lambda: first.in_hand == 20, "all is in hand")
    before = len(group.logs[0].seen)
    group.join(Threads(score))
    group.step_until(group.shared, "one partition each")
    group.for_a_while(POLL_S + 1.0)
    assert group.shared()
    given = [partitions for sign, partitions in group.logs[0].seen[before:] if partitions and sign == "-"]
    taken = [partitions for sign, partitions in group.logs[0].seen[before:] if partitions and sign == "+"]
    assert ([len(x) for x in given], taken) == ([1], [])
    gate.set()
    group.step_until(group.finished, "everything is committed")
    assert group.scored() == ids(records)


@BOTH
def test_s1_a_member_that_is_late_for_its_poll_loses_its_partitions_and_rejoins_without_doubling(
    join: Callable[[str], Group], protocol: str, unique: Unique
) -> None:
    group = join(protocol)
    records = trajectories(30)
    blocked: list[float] = []

    def blocks_once(record: r.Record) -> list[r.Record]:
        if not blocked:
            blocked.append(time.monotonic())
            time.sleep(2 * POLL_S)
        return score(record)

    first = group.join(Inline(blocks_once))
    group.step_until(lambda: len(first._consumer.assignment()) == 2, "the first has both")
    second = group.join(Inline(score))
    group.step_until(group.shared, "one each")
    stop, failures = threading.Event(), list[LaminarError]()

    def run_second() -> None:
        try:
            while not stop.is_set():
                if not second.step(time.time()):
                    time.sleep(0.005)
        except LaminarError as error:
            failures.append(error)

    thread = threading.Thread(target=run_second)
    thread.start()
    try:
        for partition in range(2):
            group.write(records[15 * partition : 15 * partition + 15], partition, unique("writer"))
        group.step_until(lambda: bool(blocked), "the first is blocked", [first])
        group.step_until(group.finished, "everything is committed", [first])
        group.step_until(group.shared, "the first has rejoined", [first])
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert failures == []
    assert group.scored() == ids(records)
    moves = [partitions for sign, partitions in group.logs[0].seen if sign == "-" and partitions]
    assert 1 <= len(moves) <= 2  # for the newcomer, and for being late


@BOTH
def test_s11_a_record_that_outlasts_every_timeout_keeps_its_partition_and_holds_no_other(
    join: Callable[[str], Group], protocol: str, unique: Unique
) -> None:
    group = join(protocol)
    slow, *records = trajectories(31)
    ended = threading.Event()

    def sometimes(record: r.Record) -> list[r.Record]:
        if record == slow:
            time.sleep(3 * max(POLL_S, SESSION_S))
            ended.set()
        return score(record)

    worker = Threads(sometimes)
    loop = group.join(worker, max_in_hand=16)
    group.write([slow], 0, unique("writer"))
    for index in range(3):
        group.write(records[10 * index : 10 * index + 10], 1, unique("writer"))
    where = {TopicPartition(IN, 0): 0, TopicPartition(IN, 1): 30}
    group.step_until(lambda: len(group.scored()) == 30, "the others are through")
    assert not ended.is_set()
    group.step_until(group.finished, "the slow one too")
    assert group.scored() == ids([slow, *records])
    assert worker.called[slow.trajectory_id] == 1
    assert [x for x in group.logs[0].seen if x[0] == "-"] == []
    assert loop._consumer.assignment() == where.keys()
