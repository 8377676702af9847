"""Who should own which partition: pure functions from members to targets.

* ``sticky``: balanced within one partition, moving as few partitions as possible.
* ``range``: contiguous blocks per topic, members in order of their ids (Kafka's RangeAssignor).

>>> a, b = TopicPartition("t", 0), TopicPartition("t", 1)
>>> sorted(assign("sticky", {"m1": frozenset({"t"}), "m2": frozenset({"t"})}, {"t": 2}, {a: "m1", b: "m1"}).values())
['m1', 'm2']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from laminar.streams.log import TopicPartition

__all__ = ["Assignor", "assign"]

Assignor = Literal["sticky", "range"]


def assign(
    assignor: Assignor,
    members: Mapping[str, frozenset[str]],
    partitions: Mapping[str, int],
    current: Mapping[TopicPartition, str],
) -> dict[TopicPartition, str]:
    """The target owner of every partition that some member subscribes to.

    ``members``: subscribed topics by member id; ``partitions``: number by topic; ``current``: targets or owners so far.
    """
    if assignor == "range":
        return _range(members, partitions)
    return _sticky(members, partitions, current)


def _range(members: Mapping[str, frozenset[str]], partitions: Mapping[str, int]) -> dict[TopicPartition, str]:
    target: dict[TopicPartition, str] = {}
    for topic, count in sorted(partitions.items()):
        subscribed = sorted(m for m, topics in members.items() if topic in topics)
        if not subscribed:
            continue
        share, extra = divmod(count, len(subscribed))
        at = 0
        for index, member in enumerate(subscribed):
            size = share + (index < extra)
            for partition in range(at, at + size):
                target[TopicPartition(topic, partition)] = member
            at += size
    return target


def _sticky(
    members: Mapping[str, frozenset[str]],
    partitions: Mapping[str, int],
    current: Mapping[TopicPartition, str],
) -> dict[TopicPartition, str]:
    every = [TopicPartition(topic, p) for topic, count in sorted(partitions.items()) for p in range(count)]
    subscribers = {topic: sorted(m for m, topics in members.items() if topic in topics) for topic in partitions}
    target: dict[TopicPartition, str] = {}
    load = dict.fromkeys(members, 0)
    in_topic: dict[tuple[str, str], int] = {}

    def give(partition: TopicPartition, member: str) -> None:
        target[partition] = member
        load[member] += 1
        in_topic[member, partition.topic] = in_topic.get((member, partition.topic), 0) + 1

    def lightest(topic: str) -> str:
        return min(subscribers[topic], key=lambda m: (load[m], in_topic.get((m, topic), 0), m))

    free = []
    for partition in every:
        owner = current.get(partition)
        if owner is not None and owner in subscribers[partition.topic]:
            give(partition, owner)
        elif subscribers[partition.topic]:
            free.append(partition)
    for partition in free:
        give(partition, lightest(partition.topic))
    # Every move below lowers the sum of squared loads, so the loop ends.
    moved = True
    while moved:
        moved = False
        for partition, owner in target.items():
            other = lightest(partition.topic)
            if load[other] + 1 < load[owner]:
                load[owner] -= 1
                in_topic[owner, partition.topic] -= 1
                give(partition, other)
                moved = True
    return target
