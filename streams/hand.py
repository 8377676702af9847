"""The records in hand of the exactly-once loop (``loop.py``): polled and not yet committed, in order per partition.

Offsets only ever advance over records that are done: what may be committed of a partition are the finished entries in
front of its first unfinished one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from laminar.schemas.records import Record
from laminar.streams.log import LogRecord, OutRecord, TopicPartition

__all__ = ["Batch", "Entry", "Hand"]

_RECORD_BYTES = 200
"""What any record costs beside its value."""


@dataclass(slots=True, eq=False)
class Entry:
    """One input record in hand, or offsets that are skipped because their records are gone."""

    partition: TopicPartition
    next_offset: int
    """What is committed once this entry is done."""
    source: LogRecord | None = None
    """None: skipped offsets; the outputs say which."""
    record: Record | None = None
    """Until it is done."""
    attempt: int = 0
    ticket: int = -1
    """-1: the worker does not have it."""
    outputs: list[OutRecord] = field(default_factory=list)
    output_bytes: int = 0
    done: bool = False
    dead: bool = False
    """Its only output is its dead letter."""
    bare: bool = False
    """The letter goes without the source's bytes: with them it was too large itself."""
    skipped: int = 0
    """Offsets."""

    def finish(self, outputs: list[OutRecord]) -> None:
        """These are its outputs; the decoded record is not needed any more."""
        self.outputs = outputs
        self.output_bytes = sum(len(output.value or b"") + _RECORD_BYTES for output in outputs)
        self.done = True
        self.record = None

    @property
    def input_bytes(self) -> int:
        """What it counts for, against the bytes that may be in hand."""
        return _RECORD_BYTES + (0 if self.source is None else len(self.source.value or b""))


@dataclass(slots=True)
class Batch:
    """What one transaction takes."""

    entries: list[Entry] = field(default_factory=list)
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    output_bytes: int = 0
    input_bytes: int = 0


class Hand:
    """All entries."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        """Of the entries' inputs."""
        self._queues: dict[TopicPartition, deque[Entry]] = {}
        self._bytes: dict[TopicPartition, int] = {}

    def add(self, entry: Entry) -> None:
        """Behind what there is of its partition."""
        size = entry.input_bytes
        self._queues.setdefault(entry.partition, deque()).append(entry)
        self._bytes[entry.partition] = self._bytes.get(entry.partition, 0) + size
        self.bytes += size
        self.count += 1

    def holds(self, partition: TopicPartition, count: int, size: int) -> bool:
        """Whether that many entries, or bytes, of a partition are in hand."""
        return len(self._queues.get(partition, ())) >= count or self._bytes.get(partition, 0) >= size

    def of(self, partitions: Iterable[TopicPartition]) -> Iterator[Entry]:
        """The entries of these partitions."""
        for partition in partitions:
            yield from self._queues.get(partition, ())

    def ready(self, max_bytes: int, only: frozenset[TopicPartition] | None = None) -> Batch:
        """What may be committed, of all partitions or of these, within the bytes (but at least one entry)."""
        batch = Batch()
        for partition in self._queues if only is None else only:
            for entry in self._queues.get(partition, ()):
                if not entry.done or (batch.entries and batch.output_bytes + entry.output_bytes > max_bytes):
                    break
                batch.entries.append(entry)
                batch.offsets[partition] = entry.next_offset
                batch.output_bytes += entry.output_bytes
                batch.input_bytes += entry.input_bytes
        return batch

    def forget(self, offsets: dict[TopicPartition, int]) -> list[Entry]:
        """Take out what these committed offsets have passed."""
        gone: list[Entry] = []
        for partition, offset in offsets.items():
            queue = self._queues.get(partition)
            while queue and queue[0].next_offset <= offset:
                gone.append(self._pop(queue))
        return gone

    def drop(self, partitions: Iterable[TopicPartition]) -> list[Entry]:
        """Take out all of these partitions."""
        gone: list[Entry] = []
        for partition in partitions:
            queue = self._queues.get(partition)
            while queue:
                gone.append(self._pop(queue))
            self._queues.pop(partition, None)
            self._bytes.pop(partition, None)
        return gone

    def _pop(self, queue: deque[Entry]) -> Entry:
        entry = queue.popleft()
        size = entry.input_bytes
        self._bytes[entry.partition] -= size
        self.bytes -= size
        self.count -= 1
        return entry
