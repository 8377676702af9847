"""Which policy versions there were: sets of numbers that hardly have gaps, and the manifests of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from laminar.streams.audit.peek import Manifest
from laminar.streams.ledger import Place, Violation, ViolationKind

__all__ = ["Numbers", "VersionBook"]


class Numbers:
    """A set of integers as ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Each after the last number of its range."""

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __bool__(self) -> bool:
        return bool(self._starts)

    @property
    def first(self) -> int:
        """The smallest; there must be one."""
        return self._starts[0]

    @property
    def last(self) -> int:
        """The largest; there must be one."""
        return self._ends[-1] - 1

    def add(self, number: int) -> None:
        """Put it in."""
        if number in self:
            return
        at = bisect_right(self._starts, number)
        joins_left = at > 0 and self._ends[at - 1] == number
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_left:
            self._ends[at - 1] = number + 1
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number + 1)


class VersionBook:
    """Folds the manifests of one run.

    ``weights.versions`` is compacted: what is left of it is its end, without gaps. So a version above the first one
    that is there should be there as well, prepared and committed.
    """

    def __init__(self) -> None:
        self._prepared = Numbers()
        self._committed = Numbers()
        self._first = -1
        self._newest_step = (0, Place("weights.versions", 0, -1))
        self._faults: list[Violation] = []

    def manifest(self, place: Place, record: Manifest) -> None:
        """The next one; the topic has one partition."""
        if self._first < 0:
            self._first = record.version
        if not record.committed:
            self._prepared.add(record.version)
        else:
            if record.version not in self._prepared and record.version > self._first:
                self._faults.append(
                    Violation(
                        kind="not_prepared",
                        trajectory_id=f"version {record.version}",
                        place=str(place),
                        detail="committed, but never prepared",
                    )
                )
            self._committed.add(record.version)
        self._newest_step = max(self._newest_step, (record.step, place))

    def fault_of(self, version: int, made: Numbers) -> tuple[ViolationKind, str] | None:
        """What is wrong with sampling by this version. ``made``: versions that trainers made."""
        if self._first < 0 or not made:
            return None
        if version not in made:
            return "unknown_version", f"version {version} was never made"
        whole = self._first <= made.first
        if version not in self._committed and (version > self._first or whole):
            return "uncommitted_version", f"version {version} was never committed"
        return None

    def violations(self, highest_step: int, old: Callable[[Place], bool]) -> Iterator[Violation]:
        """What the manifests contradict. ``highest_step``: that was ever recorded."""
        yield from self._faults
        step, place = self._newest_step
        if step > highest_step and old(place):
            yield Violation(
                kind="step_missing",
                trajectory_id=f"step {step}",
                place=str(place),
                detail=f"its weights are published, but the last recorded step is {highest_step}",
            )
