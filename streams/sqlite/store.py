"""The store: what the embedded log needs, over one database and its segment files.

A commit, in order: (1) large chunks are appended to this handle's segment (and synced if durability is ``full``), (2)
the write transaction begins, (3) the producer's epoch and the group memberships are checked, (4) offsets are given,
chunks and consumer offsets are written, (5) the transaction commits. A death before (5) leaves nothing but bytes in a
segment that nothing refers to.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from laminar.schemas.errors import Fatal, Fenced, LaminarError, OffsetOutOfRange, TopicMismatch
from laminar.streams.deadline import Deadline
from laminar.streams.embedded.assignment import Assignor
from laminar.streams.embedded.group import Group
from laminar.streams.embedded.store import Commit, Fetched, GroupToken
from laminar.streams.log import Bounds, TopicPartition, TopicSpec
from laminar.streams.sqlite import group_state
from laminar.streams.sqlite.catalog import Catalog, dump_spec
from laminar.streams.sqlite.chunk_table import ChunkTable
from laminar.streams.sqlite.database import Database
from laminar.streams.sqlite.draft import drafts
from laminar.streams.sqlite.maintenance import claim, maintain

__all__ = ["SqliteStore"]

_LOG = logging.getLogger(__name__)
_SLEEP_S = (0.002, 0.02)
_BUMP = "UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'catalog'"


class SqliteStore:
    """Implements ``laminar.streams.embedded.store.Store``."""

    blocking = True
    volatile = False

    def __init__(
        self,
        database: Database,
        chunks: ChunkTable,
        *,
        clock: Callable[[], float],
        assignor: Assignor,
        maintain_every_s: float,
    ) -> None:
        self._database = database
        self._chunks = chunks
        self._catalog = Catalog(database)
        self._groups: dict[str, Group] = {}
        self._clock = clock
        self._assignor: Assignor = assignor
        self._maintain_every_s = maintain_every_s
        self._next_maintenance = time.monotonic() + maintain_every_s

    def now(self) -> float:
        """The injected clock."""
        return self._clock()

    def monotonic(self) -> float:
        """The machine's monotonic clock, which all processes share."""
        return time.monotonic()

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """All of them, or none when one does not match."""
        with self._database.write():
            self._catalog.refresh()
            for spec in specs:
                known = self._catalog.specs.get(spec.name)
                if known is not None and known.partitions != spec.partitions:
                    raise TopicMismatch(
                        f"{spec.name}: exists with {known.partitions} partitions, configured are {spec.partitions}"
                    )
            new = [spec for spec in specs if spec.name not in self._catalog.specs]
            for spec in new:
                self._database.execute("INSERT INTO topics VALUES (?, ?)", (spec.name, dump_spec(spec)))
                rows = [(spec.name, p) for p in range(spec.partitions)]
                self._database.execute_many("INSERT INTO partitions (topic, partition) VALUES (?, ?)", rows)
            if new:
                self._database.execute(_BUMP)

    def topics(self) -> Mapping[str, TopicSpec]:
        """All topics."""
        self._catalog.refresh()
        return self._catalog.specs

    def topic(self, name: str) -> TopicSpec:
        """One topic."""
        found = self._catalog.specs.get(name)
        if found is None:
            self._catalog.refresh()
            found = self._catalog.topic(name)
        return found

    def delete_topic(self, name: str) -> None:
        """The topic, its records and the offsets committed on it."""
        with self._database.write():
            self._catalog.refresh()
            for p in range(self._catalog.topic(name).partitions):
                number = self._catalog.row(TopicPartition(name, p)).number
                self._chunks.delete(number)
                self._database.execute("DELETE FROM offsets WHERE partition = ?", (number,))
                self._database.execute("DELETE FROM partitions WHERE id = ?", (number,))
            self._database.execute("DELETE FROM topics WHERE name = ?", (name,))
            self._database.execute(_BUMP)

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Readable range."""
        self._catalog.refresh()
        return self._catalog.row(partition).bounds

    def offset_at(self, partition: TopicPartition, timestamp_ms: int) -> int:
        """First offset whose timestamp is at least this."""
        with self._database.snapshot():
            self._catalog.refresh()
            number, bounds = self._catalog.row(partition)
            chunk = self._chunks.first_chunk_at(number, timestamp_ms, bounds.start)
            if chunk is None:
                return bounds.end
            records, _ = self._chunks.read(partition, number, chunk.first, chunk.last + 1)
            return next((r.offset for r in records if r.timestamp_ms >= timestamp_ms), bounds.end)

    def fetch(self, partition: TopicPartition, offset: int, max_records: int, who: str) -> Fetched:  # noqa: ARG002
        """Committed records from ``offset`` on."""
        if self._catalog.end(partition) == offset:  # as of the poller's own version()
            return Fetched([], offset)
        for attempt in range(3):
            with self._database.snapshot():
                self._catalog.refresh()
                number, (start, end) = self._catalog.row(partition)
                if not start <= offset <= end:
                    raise OffsetOutOfRange(f"{partition}: offset {offset} is not in the log ({start}..{end})")
                try:
                    records, complete = self._chunks.read(partition, number, offset, end, max_records)
                except FileNotFoundError as error:  # retention was faster than this snapshot
                    if attempt == 2:
                        raise Fatal(f"{partition}@{offset}: {error.filename} is missing") from error
                    continue
            return Fetched(records, end if complete or not records else records[-1].offset + 1)
        raise AssertionError

    def open_producer(self, transactional_id: str) -> int:
        """A new epoch."""
        with self._database.write():
            self._database.execute(
                "INSERT INTO producers VALUES (?, 0) ON CONFLICT (id) DO UPDATE SET epoch = epoch + 1",
                (transactional_id,),
            )
            epoch: int = self._database.row("SELECT epoch FROM producers WHERE id = ?", (transactional_id,))[0]
        return epoch

    def commit(self, commit: Commit, deadline: Deadline) -> None:
        """See the module's docstring."""
        prepared = drafts(commit.records, int(self._clock() * 1000))
        try:
            with self._database.lock, self._chunks.staged(prepared), self._database.write(deadline):
                self._check_producer(commit.transactional_id, commit.epoch)
                self._catalog.refresh()
                self._commit_offsets(commit)
                self._catalog.expect(self._chunks.insert(self._catalog, prepared))
        except BaseException:
            self._catalog.forget()
            raise
        if time.monotonic() >= self._next_maintenance:
            self._maintain_in_turn()

    def reachable(self) -> bool:
        """A local file always is."""
        return True

    def member_name(self, instance: str | None) -> str:
        """Unique over all processes."""
        return f"{instance or 'member'}-{uuid.uuid4().hex[:12]}"

    def group_revision(self, group: str) -> int:
        """-1 when it does not exist."""
        self._catalog.refresh()
        return self._catalog.groups.get(group, -1)

    @contextmanager
    def group(self, group: str) -> Iterator[Group]:
        """The group's state, alone."""
        with self._database.write():
            found = self._group(group)
            yield found
            self._database.execute(
                "INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", (group, found.revision, group_state.dump(found))
            )

    def committed(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Committed offsets."""
        self._catalog.refresh()
        names = self._catalog.names
        rows = self._database.rows("SELECT partition, next FROM offsets WHERE name = ?", (group,))
        return {names[n]: offset for n, offset in rows if n in names and names[n].topic == topic}

    def unread(self, partition: TopicPartition, offset: int) -> int:
        """Readable records from ``offset`` on."""
        with self._database.snapshot():
            self._catalog.refresh()
            number, bounds = self._catalog.row(partition)
            offset = max(offset, bounds.start)
            if self._catalog.topic(partition.topic).cleanup == "delete" or offset >= bounds.end:
                return max(0, bounds.end - offset)
            rows = self._chunks.rows(number, offset)
            count = sum(row.records for row in rows if row.first >= offset)
            if rows and rows[0].first < offset:
                count += len(self._chunks.read(partition, number, offset, rows[0].last + 1)[0])
            return count

    def version(self) -> object:
        """Changes with every commit of anybody."""
        return self._catalog.refresh()

    def wait(self, version: object, timeout_s: float) -> None:
        """Look every few milliseconds, less often the longer nothing happens."""
        end = time.monotonic() + timeout_s
        sleep_s, longest_s = _SLEEP_S
        while self._database.version() == version:
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(sleep_s, left))
            sleep_s = min(sleep_s * 1.5, longest_s)

    def maintain(self, now: float) -> None:
        """Retention, compaction and the removal of dead segments, as if the time were ``now``."""
        maintain(self._database, self._catalog, self._chunks, now)

    def close(self) -> None:
        """Close files and the connection."""
        with self._database.lock:
            self._chunks.close()
            self._database.close()

    def _maintain_in_turn(self) -> None:
        self._next_maintenance = time.monotonic() + self._maintain_every_s
        now = self._clock()
        try:
            if claim(self._database, now, self._maintain_every_s):
                self.maintain(now)
        except LaminarError as error:  # the commit before it stands; the next turn tries again
            _LOG.warning("maintenance of the log failed: %s", error)

    def _group(self, name: str) -> Group:
        row = self._database.row("SELECT revision, state FROM groups WHERE name = ?", (name,))
        return Group(name, self._assignor) if row is None else group_state.load(name, self._assignor, *row)

    def _check_producer(self, transactional_id: str, epoch: int) -> None:
        newest = self._database.row("SELECT epoch FROM producers WHERE id = ?", (transactional_id,))[0]
        if newest != epoch:
            raise Fenced(f"producer {transactional_id}: epoch {epoch} was replaced by {newest}; this process must stop")

    def _owners(self, name: str) -> Group:
        """The group with the owners of now; its members' signs of life may be old."""
        known = self._groups.get(name)
        if known is None or known.revision != self._catalog.groups.get(name):
            known = self._groups[name] = self._group(name)
        return known

    def _commit_offsets(self, commit: Commit) -> None:
        rows: list[tuple[str, int, int]] = []
        for membership, offsets in commit.offsets:
            token = membership.token
            member, revision = (token.member, token.revision) if isinstance(token, GroupToken) else (None, -1)
            self._owners(membership.group).check(member, revision, offsets)
            rows += [(membership.group, self._catalog.row(p).number, offset) for p, offset in offsets.items()]
        if rows:
            self._database.execute_many("INSERT OR REPLACE INTO offsets VALUES (?, ?, ?)", rows)
