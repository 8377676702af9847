"""The state of a consumer group, step by step."""

from __future__ import annotations

import pytest

from laminar.schemas.errors import Evicted, Fenced
from laminar.streams.embedded.group import Group
from laminar.streams.log import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def joined(group: Group, *members: str, now: float = 0.0, instance: str | None = None) -> None:
    for member in members:
        group.join(member, instance, frozenset({"t"}), now=now, session_s=10.0, partitions={"t": 2})


def test_a_partition_changes_hands_only_after_its_owner_gave_it_up() -> None:
    group = Group("g")
    joined(group, "m1")
    assert group.take("m1") == {A, B}
    joined(group, "m2")
    assert group.take("m2") == frozenset()
    (moving,) = group.unwanted("m1")
    group.release("m1", [moving])
    assert group.take("m2") == {moving}
    assert group.owned("m1") == {A, B} - {moving}


def test_an_owner_that_lost_and_regained_a_partition_cannot_commit_with_its_old_membership() -> None:
    group = Group("g")
    joined(group, "m1")
    group.take("m1")
    old = group.revision
    joined(group, "m2")
    (moving,) = group.unwanted("m1")
    group.release("m1", [moving])
    group.take("m2")
    group.leave("m2")
    assert moving in group.take("m1")
    with pytest.raises(Evicted, match=r"t\[\d\]"):
        group.check("m1", old, [moving])
    group.check("m1", group.revision, [A, B])


def test_a_silent_member_is_removed_and_its_commit_refused() -> None:
    group = Group("g")
    joined(group, "m1", now=0.0)
    group.take("m1")
    joined(group, "m2", now=8.0)
    assert group.expire(10.0) == []
    assert group.expire(10.1) == ["m1"]
    assert group.take("m2") == {A, B}
    assert not group.beat("m1", 10.2)
    with pytest.raises(Evicted, match="no longer a member"):
        group.check("m1", group.revision, [A])


def test_a_sign_of_life_from_the_future_is_from_before_a_reboot() -> None:
    group = Group("g")
    joined(group, "m1", now=1000.0)
    assert group.expire(5.0) == ["m1"]


def test_a_member_may_commit_only_what_it_owns() -> None:
    group = Group("g")
    joined(group, "m1", "m2")
    (owned,) = group.take("m1")
    group.take("m2")
    (others,) = {A, B} - {owned}
    group.check("m1", group.revision, [owned])
    with pytest.raises(Evicted, match="owner: m2"):
        group.check("m1", group.revision, [others])


def test_a_restarted_instance_inherits_at_once_and_its_zombie_is_told() -> None:
    group = Group("g")
    joined(group, "old", instance="i")
    group.take("old")
    joined(group, "new", instance="i")
    assert group.take("new") == {A, B}
    assert not group.beat("old", 1.0)
    with pytest.raises(Fenced, match="'i'"):
        group.replaced("i")


def test_offsets_without_a_member_are_refused_while_the_group_has_members() -> None:
    group = Group("g")
    group.check(None, -1, [A])
    joined(group, "m1")
    with pytest.raises(Evicted, match="members"):
        group.check(None, -1, [A])


def test_a_deleted_topic_is_taken_from_its_owners() -> None:
    group = Group("g")
    joined(group, "m1")
    group.take("m1")
    group.resize({"other": 3})
    assert group.unwanted("m1") == {A, B}
