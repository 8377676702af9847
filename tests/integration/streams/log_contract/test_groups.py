"""Consumer groups: assignment, rebalance on join, leave and death, positions, pause, lag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.schemas.errors import Aborted, Evicted, Fenced, UnknownTopic
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord, TopicPartition, TopicSpec
from tests.integration.streams.log_contract.driving import WAIT_S, commit, poll_some, produce, settle, until_true

Unique = Callable[[str], str]
Open = Callable[[], Log]


def _fill(log: Log, topic: str, name: str, count: int = 5) -> None:
    producer = log.producer(name)
    for partition in (0, 1):
        produce(producer, topic, [f"{partition}/{i}".encode() for i in range(count)], partition=partition)


def test_a_new_group_starts_at_the_beginning_and_a_known_one_at_its_commit(
    log: Log, single: str, unique: Unique
) -> None:
    group, producer = unique("g"), log.producer(unique("p"))
    produce(producer, single, [b"a", b"b", b"c"])
    consumer = log.consumer(group, [single])
    records = poll_some(consumer, 3)
    assert [r.value for r in records] == [b"a", b"b", b"c"]
    commit(producer, consumer, {records[1].source: records[1].offset + 1})
    assert consumer.committed() == {records[1].source: records[1].offset + 1}
    consumer.close()
    assert [r.value for r in poll_some(log.consumer(group, [single]), 1)] == [b"c"]


def test_two_groups_read_independently(log: Log, single: str, unique: Unique) -> None:
    produce(log.producer(unique("p")), single, [b"a", b"b"])
    one, two = log.consumer(unique("one"), [single]), log.consumer(unique("two"), [single])
    assert [r.value for r in poll_some(one, 2)] == [r.value for r in poll_some(two, 2)] == [b"a", b"b"]


def test_a_join_moves_partitions_and_every_record_has_one_reader(
    open_log: Open, log: Log, topic: str, unique: Unique
) -> None:
    group, producer = unique("g"), log.producer(unique("p"))
    _fill(log, topic, unique("in"))
    assigned: list[tuple[str, frozenset[TopicPartition]]] = []
    first = log.consumer(
        group,
        [topic],
        on_assign=lambda ps: assigned.append(("first", ps)),
        on_revoke=lambda ps: commit(producer, first, {p: first.position()[p] for p in ps}),
    )
    seen = settle([first], lambda: len(first.assignment()) == 2, "the first member owns both")
    seen += poll_some(first, 10 - len(seen))
    second = open_log().consumer(group, [topic], on_assign=lambda ps: assigned.append(("second", ps)))
    seen += settle([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 1, "one each")
    assert first.assignment().isdisjoint(second.assignment())
    assert {p for name, ps in assigned if name == "first" for p in ps} == {
        TopicPartition(topic, 0),
        TopicPartition(topic, 1),
    }
    assert ("second", second.assignment()) in assigned
    _fill(log, topic, unique("more"), count=3)
    seen += poll_some(first, 3) + poll_some(second, 3)
    seen += first.poll(100, 0.2) + second.poll(100, 0.2)
    assert len(seen) == 16
    assert len({(r.partition, r.offset) for r in seen}) == 16


def test_a_member_that_leaves_hands_its_partitions_over_at_once(
    open_log: Open, log: Log, topic: str, unique: Unique
) -> None:
    group = unique("g")
    first, second = log.consumer(group, [topic]), open_log().consumer(group, [topic])
    settle([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 1, "one each")
    second.close()
    settle([first], lambda: len(first.assignment()) == 2, "the first has both again")


def test_a_member_that_dies_loses_its_partitions_and_its_late_commit(
    open_log: Open, log: Log, topic: str, unique: Unique, handles: Any
) -> None:
    group, producer = unique("g"), log.producer(unique("p"))
    _fill(log, topic, unique("in"))
    lost: list[TopicPartition] = []
    dead = open_log().consumer(group, [topic], on_revoke=lost.extend)
    survivor = log.consumer(group, [topic])
    settle([dead, survivor], lambda: len(dead.assignment()) == len(survivor.assignment()) == 1, "one each")
    (owned,) = dead.assignment()
    membership = dead.membership()
    handles.vanish(dead)
    settle([survivor], lambda: len(survivor.assignment()) == 2, "the survivor has both")

    def late() -> None:
        with producer.transaction() as tx:
            tx.commit_offsets(membership, {owned: 3})

    with pytest.raises((Evicted, Aborted)):
        late()
    assert owned not in log.committed(group, topic)


def test_a_restarted_instance_takes_over_at_once_and_its_zombie_is_fenced(
    open_log: Open, log: Log, topic: str, unique: Unique, handles: Any
) -> None:
    if not handles.replaces_instances:
        pytest.skip("members are dynamic under this group protocol")
    group = unique("g")
    old = log.consumer(group, [topic], instance="rollout-0")
    settle([old], lambda: len(old.assignment()) == 2, "the old process owns both")
    new = open_log().consumer(group, [topic], instance="rollout-0")
    settle([new], lambda: len(new.assignment()) == 2, "the new process owns both")

    def zombie() -> None:
        settle([old], lambda: False, "never")

    with pytest.raises(Fenced):
        zombie()
    new.poll(1, 0.0)
    assert len(new.assignment()) == 2


def test_a_paused_partition_returns_nothing_and_goes_on_where_it_stopped(log: Log, topic: str, unique: Unique) -> None:
    _fill(log, topic, unique("in"))
    held = TopicPartition(topic, 0)
    consumer = log.consumer(unique("g"), [topic], on_assign=lambda ps: consumer.pause(ps & {held}))
    records = poll_some(consumer, 5)
    assert {r.partition for r in records} == {1}
    assert consumer.poll(100, 0.3) == []
    assert held in consumer.assignment()
    consumer.resume(frozenset({held}))
    assert [r.value for r in poll_some(consumer, 5)] == [f"0/{i}".encode() for i in range(5)]


def test_seek_goes_back_and_forth(log: Log, single: str, unique: Unique) -> None:
    produce(log.producer(unique("p")), single, [b"a", b"b", b"c", b"d"])
    where = TopicPartition(single, 0)
    consumer = log.consumer(unique("g"), [single])
    records = poll_some(consumer, 4)
    consumer.seek(where, records[1].offset)
    assert consumer.position() == {where: records[1].offset}
    assert [r.value for r in poll_some(consumer, 3)] == [b"b", b"c", b"d"]
    consumer.seek(where, records[3].offset)
    assert [r.value for r in poll_some(consumer, 1)] == [b"d"]


def test_a_partition_that_is_not_owned_cannot_be_sought(log: Log, topic: str, unique: Unique) -> None:
    consumer = log.consumer(unique("g"), [topic])
    with pytest.raises(Evicted, match="not assigned"):
        consumer.seek(TopicPartition(topic, 0), 0)


def test_lag_counts_what_is_left_and_reaches_zero(log: Log, topic: str, unique: Unique) -> None:
    group, producer = unique("g"), log.producer(unique("p"))
    _fill(log, topic, unique("in"))
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    before = log.lag(group, topic)
    assert before[zero] >= 5
    assert before[one] >= 5
    consumer = log.consumer(group, [topic])
    settle([consumer], lambda: len(consumer.assignment()) == 2, "both")
    settle(
        [consumer],
        lambda: all(log.lag(group, topic)[p] == 0 or at >= 5 for p, at in consumer.position().items()),
        "read",
    )
    consumer.poll(1, 0.1)
    commit(producer, consumer, consumer.position())
    until_true(lambda: log.lag(group, topic) == {zero: 0, one: 0}, "lag reaches 0")
    produce(producer, topic, [b"x"], partition=1)
    until_true(lambda: log.lag(group, topic)[one] >= 1, "lag grows")
    assert log.lag(group, topic)[zero] == 0


def test_poll_returns_at_most_what_was_asked_for_and_starves_no_partition(log: Log, topic: str, unique: Unique) -> None:
    _fill(log, topic, unique("in"), count=50)
    consumer = log.consumer(unique("g"), [topic])
    records: list[LogRecord] = []
    deadline = Deadline.after(WAIT_S, "100 records")
    while len(records) < 100:
        deadline.check()
        batch = consumer.poll(3, 0.5)
        assert len(batch) <= 3
        records += batch
    assert len(records) == 100
    assert {r.partition for r in records[:60]} == {0, 1}
    for partition in (0, 1):
        assert [r.value for r in records if r.partition == partition] == [
            f"{partition}/{i}".encode() for i in range(50)
        ]


def test_a_consumer_of_an_unknown_topic_is_refused(log: Log, unique: Unique) -> None:
    absent = unique("absent")

    def subscribe() -> None:
        log.consumer(unique("g"), [absent]).poll(1, 0.1)

    with pytest.raises(UnknownTopic, match=absent):
        subscribe()


def test_members_of_two_topics_share_both(open_log: Open, log: Log, topic: str, unique: Unique) -> None:
    group, more = unique("g"), unique("more")
    log.create_topics([TopicSpec(name=more, partitions=4)])
    members = [h.consumer(group, [topic, more]) for h in (log, open_log(), open_log())]
    settle(members, lambda: sorted(len(m.assignment()) for m in members) == [2, 2, 2], "two each")
    every = frozenset[TopicPartition]().union(*(m.assignment() for m in members))
    assert len(every) == 6
