"""The door for new groups: a member of the consumer group of ``prompts`` that takes no more than there is room for.

A polled group that does not fit stays here, uncommitted, in order; nothing more is fetched meanwhile, and the polls
that keep the membership alive return nothing. Offsets are committed by the transaction that takes the groups, and
advance over taken groups only. A revoked partition's groups are dropped: they are the next owner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError, LaminarError
from laminar.schemas.records import Prompt
from laminar.streams.log import Log, LogRecord, Membership, TopicPartition

__all__ = ["Intake", "Offer"]

_TOPIC = "prompts"


@dataclass(frozen=True, slots=True)
class Offer:
    """One polled record: a group, or bytes that are none."""

    source: LogRecord
    prompt: Prompt | None
    error: LaminarError | None = None
    """Why it cannot be taken."""


class Intake:
    """See the module's docstring."""

    def __init__(self, log: Log, codec: Codec, *, group: str, instance: str) -> None:
        self._codec = codec
        self._offers: deque[Offer] = deque()
        self._paused: frozenset[TopicPartition] = frozenset()
        self._polled = False
        self._losses = 0
        self.closed = False
        """It has left the group."""
        self._consumer = log.consumer(group, [_TOPIC], instance=instance, on_assign=self._lost, on_revoke=self._lost)

    def offers(self, fetch: int) -> Iterator[Offer]:
        """What is next, in order; polls for up to ``fetch`` more when nothing is at hand, and ends when none comes.

        The caller stops at the first offer that it cannot take, and calls ``taken`` after its commit.
        """
        seen = 0
        while True:
            if seen == len(self._offers):
                losses = self._losses
                if not self._fetch(fetch) or losses != self._losses:
                    return
            yield self._offers[seen]
            seen += 1

    def holds(self, offers: list[Offer]) -> bool:
        """Whether these are still what is next: a rebalance inside a poll may have taken some of them away."""
        return all(a is b for a, b in zip(offers, self._offers, strict=False)) and len(offers) <= len(self._offers)

    def keep_alive(self) -> None:
        """A sign of life that fetches nothing, unless there was another one since the last call."""
        if self._polled:
            self._polled = False
            return
        self._pause(self._consumer.assignment())
        for record in self._consumer.poll(1, 0.0):  # of a partition that was assigned in this poll
            self._offers.append(self._offer(record))

    def membership(self) -> Membership:
        """For the transaction."""
        return self._consumer.membership()

    def taken(self, n: int) -> None:
        """The first ``n`` offers are committed."""
        for _ in range(n):
            self._offers.popleft()

    def rewind(self) -> None:
        """The membership was lost: poll again what was not committed, as far as it is still ours."""
        first: dict[TopicPartition, int] = {}
        for offer in self._offers:
            first.setdefault(offer.source.source, offer.source.offset)
        self._offers.clear()
        for partition in self._consumer.assignment() & first.keys():
            self._consumer.seek(partition, first[partition])

    def close(self) -> None:
        """Leave the group."""
        if not self.closed:
            self.closed = True
            self._offers.clear()
            self._consumer.close()

    def _fetch(self, n: int) -> bool:
        self._pause(frozenset())
        self._polled = True
        records = self._consumer.poll(n, 0.0)
        self._offers.extend(self._offer(record) for record in records)
        return bool(records)

    def _pause(self, wanted: frozenset[TopicPartition]) -> None:
        if wanted - self._paused:
            self._consumer.pause(wanted - self._paused)
        if self._paused - wanted:
            self._consumer.resume((self._paused - wanted) & self._consumer.assignment())
        self._paused = wanted

    def _offer(self, record: LogRecord) -> Offer:
        try:
            decoded = self._codec.decode(record.value or b"")
        except DecodeError as error:
            return Offer(record, None, error)
        if not isinstance(decoded, Prompt):
            return Offer(record, None, DecodeError(f"{record.where}: {type(decoded).__name__} is not a Prompt"))
        return Offer(record, decoded)

    def _lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Assigned or revoked: either way what is held of these partitions is void."""
        self._losses += 1
        self._offers = deque(offer for offer in self._offers if offer.source.source not in partitions)
        self._paused -= partitions
