"""Assignment: everything has an owner, loads are balanced, few partitions move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.streams.embedded.assignment import Assignor, assign
from laminar.streams.log import TopicPartition

MEMBERS = st.sets(st.sampled_from("abcdefgh"), min_size=1)
PARTITIONS = st.dictionaries(st.sampled_from(["t", "u"]), st.integers(1, 12), min_size=1)


def spread(target: dict[TopicPartition, str], members: set[str]) -> int:
    loads = [list(target.values()).count(m) for m in members]
    return max(loads) - min(loads)


@pytest.mark.parametrize("assignor", ["sticky", "range"])
@given(members=MEMBERS, partitions=PARTITIONS)
def test_every_partition_has_an_owner_and_loads_differ_little(
    assignor: Assignor, members: set[str], partitions: dict[str, int]
) -> None:
    target = assign(assignor, {m: frozenset(partitions) for m in members}, partitions, {})
    assert set(target) == {TopicPartition(t, p) for t, n in partitions.items() for p in range(n)}
    assert set(target.values()) <= members
    assert spread(target, members) <= (1 if assignor == "sticky" else len(partitions))


@given(before=MEMBERS, after=MEMBERS, partitions=PARTITIONS)
def test_sticky_moves_no_more_than_it_must(before: set[str], after: set[str], partitions: dict[str, int]) -> None:
    topics = frozenset(partitions)
    old = assign("sticky", dict.fromkeys(before, topics), partitions, {})
    new = assign("sticky", dict.fromkeys(after, topics), partitions, old)
    assert spread(new, after) <= 1
    total = sum(partitions.values())
    share, extra = divmod(total, len(after))
    loads = sorted((list(old.values()).count(m) for m in after), reverse=True)
    could_stay = sum(min(load, share + (index < extra)) for index, load in enumerate(loads))
    stayed = sum(new[p] == owner for p, owner in old.items())
    assert stayed == could_stay


@given(st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(["t", "u", "v"]))))
def test_a_member_gets_only_topics_it_asked_for(members: dict[str, set[str]]) -> None:
    partitions = {"t": 3, "u": 5, "v": 1}
    for assignor in ("sticky", "range"):
        target = assign(assignor, {m: frozenset(ts) for m, ts in members.items()}, partitions, {})
        assert all(p.topic in members[m] for p, m in target.items())
        wanted = {t for ts in members.values() for t in ts}
        assert len(target) == sum(partitions[t] for t in wanted)
