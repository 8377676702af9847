"""The chunks of all partitions: in the database, large ones in segment files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from laminar.schemas.errors import Unavailable
from laminar.streams.log import LogRecord, TopicPartition
from laminar.streams.sqlite.catalog import Catalog
from laminar.streams.sqlite.chunk import pack, unpack
from laminar.streams.sqlite.database import Database
from laminar.streams.sqlite.draft import Draft
from laminar.streams.sqlite.segment import Place, SegmentReader, SegmentWriter, collect

__all__ = ["LAST", "ChunkRow", "ChunkTable"]

LAST = (1 << 40) - 1
"""The largest offset."""
_INSERT = (
    "INSERT INTO chunks (id, first, records, newest_ms, size, data, segment, position, digest)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_SELECT = (
    "SELECT id, first, size, data, segment, position, digest FROM chunks WHERE id BETWEEN ? AND ? AND first < ?"
    " ORDER BY id"
)


def _id(number: int, offset: int) -> int:
    """A chunk's row id: its partition's number and its last offset, so that row order is log order."""
    return number << 40 | min(offset, LAST)


class ChunkRow(NamedTuple):
    """A chunk as it stands in the database, without its bytes."""

    id: int
    first: int
    records: int
    newest_ms: int
    size: int

    @property
    def last(self) -> int:
        """Last offset that the chunk ever held."""
        return self.id & LAST


class ChunkTable:
    """Used under the database's lock."""

    def __init__(self, database: Database, segments: Path, fetch_bytes: int) -> None:
        segments.mkdir(exist_ok=True)
        self._database = database
        self._segments = segments
        self._fetch_bytes = fetch_bytes
        self._writer = SegmentWriter(segments)
        self._reader = SegmentReader(segments)

    @contextmanager
    def staged(self, prepared: Sequence[Draft]) -> Iterator[None]:
        """Large chunks are in a segment while the block runs; when it raises they are forgotten."""
        mark = self._writer.mark()
        try:
            try:
                for draft in prepared:
                    if draft.large:
                        draft.place = self._writer.append(draft.parts)
                if self._database.durability == "full":
                    self._writer.sync()
            except OSError as error:
                raise Unavailable(f"{self._segments}: {error.strerror or error}") from error
            yield
        except BaseException:
            self._writer.rewind(mark)
            raise

    def insert(self, catalog: Catalog, prepared: Sequence[Draft]) -> dict[TopicPartition, int]:
        """Give offsets and write rows; returns the new ends. Raises UnknownTopic."""
        ends: dict[TopicPartition, tuple[int, int]] = {}
        rows = []
        for draft in prepared:
            if draft.partition not in ends:
                known = catalog.row(draft.partition)
                ends[draft.partition] = known.number, known.bounds.end
            number, first = ends[draft.partition]
            ends[draft.partition] = number, first + draft.count
            place = draft.place
            rows.append(
                (
                    _id(number, first + draft.count - 1),
                    *(first, draft.count, draft.newest_ms, draft.size),
                    b"".join(draft.parts) if place is None else None,
                    *((None, None, None) if place is None else (place.segment, place.position, place.digest)),
                )
            )
        self._database.execute_many(_INSERT, rows)
        updates = [(end, number) for number, end in ends.values()]
        self._database.execute_many("UPDATE partitions SET end = ? WHERE id = ?", updates)
        return {partition: end for partition, (_, end) in ends.items()}

    def read(
        self, partition: TopicPartition, number: int, offset: int, end: int, max_records: int = LAST
    ) -> tuple[list[LogRecord], bool]:
        """Records in offset .. end - 1, and whether these are all (or a limit came first). At least one, if any."""
        found: list[LogRecord] = []
        size = 0
        with self._database.stream(_SELECT, (_id(number, offset), _id(number, LAST), end)) as rows:
            for row in rows:
                if len(found) >= max_records or (found and size >= self._fetch_bytes):
                    return found, False
                data, limit = self._bytes(partition, row), max_records - len(found)
                size += len(data)
                more = unpack(data, partition, first=row[1], start=offset, limit=limit)
                found += more
                if len(more) == limit:
                    return found, False
        return found, True

    def rows(self, number: int, first: int = 0) -> list[ChunkRow]:
        """The partition's chunks that hold ``first`` or a later offset."""
        sql = "SELECT id, first, records, newest_ms, size FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id"
        return [ChunkRow(*row) for row in self._database.rows(sql, (_id(number, first), _id(number, LAST)))]

    def first_chunk_at(self, number: int, timestamp_ms: int, start: int) -> ChunkRow | None:
        """The first one that holds a record of this time or later."""
        sql = (
            "SELECT id, first, records, newest_ms, size FROM chunks"
            " WHERE id BETWEEN ? AND ? AND newest_ms >= ? ORDER BY id LIMIT 1"
        )
        found = self._database.row(sql, (_id(number, start), _id(number, LAST), timestamp_ms))
        return None if found is None else ChunkRow(*found)

    def delete(self, number: int, last: int = LAST) -> None:
        """All chunks of the partition whose last offset is at most ``last``."""
        self._database.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", (_id(number, 0), _id(number, last)))

    def replace(self, row: ChunkRow, records: Sequence[LogRecord]) -> None:
        """Keep only these records of a chunk."""
        if not records:
            self._database.execute("DELETE FROM chunks WHERE id = ?", (row.id,))
            return
        data = pack(records, row.first)
        self._database.execute(
            "UPDATE chunks SET records = ?, newest_ms = ?, size = ?, data = ?, segment = NULL, position = NULL,"
            " digest = NULL WHERE id = ?",
            (len(records), max(r.timestamp_ms for r in records), len(data), data, row.id),
        )

    def collect(self) -> None:
        """Delete segments that nobody writes and nothing refers to."""

        def used(segment: int) -> int:
            sql = "SELECT MAX(position + size) FROM chunks WHERE segment = ?"
            return int(self._database.row(sql, (segment,))[0] or 0)

        collect(self._segments, used)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._reader.close()

    def _bytes(self, partition: TopicPartition, row: Any) -> bytes:
        _, first, size, data, segment, position, digest = row
        if segment is None:
            return bytes(data)
        return self._reader.read(Place(segment, position, size, digest), f"{partition}@{first}")
