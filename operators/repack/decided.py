"""What repack has decided and its fold has not read back yet.

A decision is in the log once it is committed, but it can be read only when every transaction that was opened in front
of it is over. A rollout that stalls inside a transaction so hides it for as long, also from a repack that starts anew:
that one would decide a second time, and name a second owner. Committed offsets are not hidden like that. So each
transaction also commits, to the group ``{group}.decided``, per partition of ``trajectories.partial``, the time of the
newest decision there that was not read back (0: none), and nothing is decided before all of them were.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.schemas import records as r
from laminar.streams.log import Log, Membership, TopicPartition

__all__ = ["Decided"]


class Decided:
    """See the module's docstring."""

    def __init__(self, group: str, topic: str) -> None:
        self.membership = Membership(f"{group}.decided")
        self._topic = topic
        self._newest: dict[TopicPartition, int] = {}
        self._read: dict[TopicPartition, int] = {}
        """Time of the newest decision that the fold has read."""

    def begin(self) -> None:
        """The fold begins anew, from its committed offsets: nothing is read yet."""
        self._read.clear()

    def load(self, log: Log) -> None:
        """As the log says, less what was read meanwhile. Raises Retryable."""
        committed = log.committed(self.membership.group, self._topic)
        self._newest = {p: at_ms for p, at_ms in committed.items() if at_ms > self._read.get(p, 0)}

    @property
    def unread(self) -> bool:
        """Whether some decision was not read back."""
        return bool(self._newest)

    def read(self, event: object, source: TopicPartition) -> None:
        """The next record of the pool."""
        if not isinstance(event, r.TrajectoryMoved) or event.reason != "dead":
            return
        self._read[source] = max(event.at_ms, self._read.get(source, 0))
        if event.at_ms >= self._newest.get(source, 0):
            self._newest.pop(source, None)

    def with_more(
        self, every: Iterable[TopicPartition], decided: Iterable[TopicPartition], at_ms: int
    ) -> dict[TopicPartition, int]:
        """What to commit with decisions of ``at_ms`` in the partitions ``decided``."""
        return {**dict.fromkeys(every, 0), **self._newest, **dict.fromkeys(decided, at_ms)}

    def committed(self, offsets: dict[TopicPartition, int]) -> None:
        """The transaction with these is through."""
        self._newest = {partition: at_ms for partition, at_ms in offsets.items() if at_ms > 0}
