"""The loop in processes of their own: killed, stopped past every timeout, replaced."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import TopicPartition
from tests.support.broker import SESSION_S
from tests.support.reward_group import RewardGroup, reward_topics, trajectories

pytestmark = pytest.mark.kafka

Make = Callable[..., KafkaLog]
Unique = Callable[[str], str]
Start = Callable[..., RewardGroup]
PARTITIONS = 4
BOTH = pytest.mark.parametrize("protocol", ["consumer", "classic"])


@pytest.fixture
def start(broker: Broker, make_log: Make, unique: Unique) -> Iterator[Start]:
    log = make_log()
    groups: list[RewardGroup] = []

    def make(protocol: str, **settings: Any) -> RewardGroup:
        ours = {"bootstrap": broker.bootstrap, "run": unique("run"), "group_protocol": protocol}
        settings["log"] = {"session_timeout_s": SESSION_S, **settings.get("log", {})}
        groups.append(RewardGroup(log, {**ours, **settings}))
        return groups[-1]

    with reward_topics(log, PARTITIONS):
        yield make
        for group in groups:
            group.close()


def patient(broker: Broker, group: str) -> None:
    """Sessions of 30 s for this group, under ``consumer`` too."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    entry = ConfigEntry("consumer.session.timeout.ms", "30000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)


@BOTH
def test_s5_after_a_kill_between_produce_and_commit_readers_advance_as_soon_as_the_successor_starts(
    start: Start, protocol: str, unique: Unique
) -> None:
    group = start(protocol)
    records = trajectories(40)
    group.write(records, PARTITIONS, unique("writer"))
    group.start("reward-0", stall_s=60.0)
    group["reward-0"].wait_for("stalling")
    group["reward-0"].end(signal.SIGKILL)
    reader = group.log.reader()
    assert {reader.bounds(TopicPartition("trajectories.scored", p)).end for p in range(2)} == {0}
    group.start("reward-0")
    group.wait_until_done()
    assert group.scored() == Counter(x.trajectory_id for x in records)


@BOTH
def test_s3_a_process_stopped_past_the_transaction_and_the_session_timeout_goes_on_in_place(
    start: Start, protocol: str, unique: Unique
) -> None:
    group = start(
        protocol, log={"request_timeout_s": 1.5, "transaction_timeout_s": 2.0, "session_timeout_s": SESSION_S}
    )
    records = trajectories(40)
    group.write(records, PARTITIONS, unique("writer"))
    group.start("reward-0", stall_s=1.0)
    process = group["reward-0"]
    process.wait_for("stalling")
    process.send(signal.SIGSTOP)
    time.sleep(SESSION_S + 2.5)
    assert group.scored() == Counter()
    process.send(signal.SIGCONT)
    group.wait_until_done()
    assert process.popen.poll() is None, process.hear()
    assert group.scored() == Counter(x.trajectory_id for x in records)
    assert process.end() == 0


@BOTH
def test_a_process_that_was_replaced_while_it_was_stopped_is_fenced_and_ends_with_76(
    start: Start, protocol: str, unique: Unique
) -> None:
    group = start(protocol)
    records = trajectories(40)
    group.write(records, PARTITIONS, unique("writer"))
    group.start("reward-0", stall_s=1.0)
    zombie = group["reward-0"]
    zombie.wait_for("stalling")
    zombie.send(signal.SIGSTOP)
    group.start("reward-0")
    group.wait_until_done()
    zombie.send(signal.SIGCONT)
    assert zombie.popen.wait(60) == 76, zombie.hear()
    group.write(trajectories(8, start=40), PARTITIONS, unique("writer"))
    group.wait_until_done()
    assert group["reward-0"].popen.poll() is None
    assert group.scored() == Counter(x.trajectory_id for x in trajectories(48))


@BOTH
def test_work_that_ends_out_of_order_survives_kills_exactly_once(start: Start, protocol: str, unique: Unique) -> None:
    napping = {"function": "tests.support.rewards:nap", "concurrency": 2, "max_in_hand": 32}
    group = start(protocol, reward=napping)
    records = trajectories(100)
    group.write(records, PARTITIONS, unique("writer"))
    group.start("reward-0", "reward-1")
    rng = random.Random(3)
    reader = group.log.reader()
    for instance in ("reward-0", "reward-1"):
        before = sum(group.lag().values())
        group.wait_until(lambda before=before: sum(group.lag().values()) < before, "progress")  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.2))
        group[instance].end(signal.SIGKILL)
        group.start(instance)
    reader.close()
    group.wait_until_done(120.0)
    assert group.scored() == Counter(x.trajectory_id for x in records)


def test_a_rolling_restart_moves_no_partition_of_the_others(broker: Broker, start: Start, unique: Unique) -> None:
    group = start("consumer", log={"session_timeout_s": 30.0})
    patient(broker, f"{group.run}.reward")
    names = [f"reward-{i}" for i in range(4)]
    group.start(*names)
    group.wait_until(lambda: sorted(p for n in names for p in group[n].owned) == list(range(PARTITIONS)), "all owned")
    time.sleep(1.0)
    group.wait_until(lambda: all(len(group[n].owned) == 1 for n in names), "one each")
    owned = {name: group[name].owned for name in names}
    said = {name: len(group[name].hear()) for name in names}
    group.write(trajectories(20), PARTITIONS, unique("writer"))
    for name in names[:2]:
        assert group[name].end() == 0
        group.start(name)
        group.wait_until(lambda name=name: group[name].owned == owned[name], f"{name} has its own again")  # type: ignore[misc]
    group.wait_until_done()
    moves = [x for name in names[2:] for x in group[name].hear()[said[name] :] if x.get("partitions")]
    assert moves == []
    assert group.scored() == Counter(x.trajectory_id for x in trajectories(20))
