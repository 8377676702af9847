"""The groups that are through, in memory that does not grow with the run.

Group ids are ``{dataset}/{epoch}/{index}``; indices of one (dataset, epoch) are kept as half-open ranges, which grow
together as a pass over the data closes.

>>> done = DoneGroups().add("a/0/0").add("a/0/1")
>>> "a/0/1" in done, done.ranges
(True, {'a/0': ((0, 2),)})
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DoneGroups"]

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DoneGroups:
    """An immutable set of group ids."""

    ranges: Mapping[str, Ranges] = field(default_factory=dict)
    """Prefix -> sorted, disjoint, non-adjacent ranges [first, after last) of indices."""
    others: frozenset[str] = frozenset()
    """Ids that do not end in an index."""

    def __contains__(self, group_id: str) -> bool:
        prefix, index = _split(group_id)
        if index is None:
            return group_id in self.others
        ranges = self.ranges.get(prefix, ())
        at = bisect_right(ranges, index, key=lambda r: r[0]) - 1
        return at >= 0 and index < ranges[at][1]

    def __len__(self) -> int:
        return len(self.others) + sum(end - start for ranges in self.ranges.values() for start, end in ranges)

    def add(self, group_id: str) -> DoneGroups:
        """The set with this id in it."""
        if group_id in self:
            return self
        prefix, index = _split(group_id)
        if index is None:
            return DoneGroups(self.ranges, self.others | {group_id})
        ranges = self.ranges.get(prefix, ())
        at = bisect_right(ranges, index, key=lambda r: r[0])
        first, after = index, index + 1
        left, right = at, at
        if at > 0 and ranges[at - 1][1] == index:
            left, first = at - 1, ranges[at - 1][0]
        if at < len(ranges) and ranges[at][0] == after:
            right, after = at + 1, ranges[at][1]
        merged = (*ranges[:left], (first, after), *ranges[right:])
        return DoneGroups({**self.ranges, prefix: merged}, self.others)


def _split(group_id: str) -> tuple[str, int | None]:
    """Prefix and index; index None unless the id can be rebuilt from both."""
    prefix, slash, index = group_id.rpartition("/")
    if slash and index.isascii() and index.isdigit() and str(int(index)) == index:
        return prefix, int(index)
    return group_id, None
