"""Retention, compaction and the removal of dead segments. Any writer runs it now and then."""

from __future__ import annotations

from laminar.streams.embedded.retention import Entry, superseded
from laminar.streams.log import TopicPartition, TopicSpec
from laminar.streams.sqlite.catalog import Catalog, PartitionRow
from laminar.streams.sqlite.chunk_table import ChunkTable
from laminar.streams.sqlite.database import Database

__all__ = ["claim", "maintain"]


def claim(database: Database, now: float, every_s: float) -> bool:
    """Whether it is this process's turn: nobody has run it for ``every_s``."""
    with database.write():
        found = database.row("SELECT value FROM meta WHERE key = 'maintained'")
        if found is not None and 0 <= now - float(found[0]) < every_s:
            return False
        database.execute("INSERT OR REPLACE INTO meta VALUES ('maintained', ?)", (str(now),))
        return True


def maintain(database: Database, catalog: Catalog, chunks: ChunkTable, now: float) -> None:
    """All topics, as if the time were ``now`` (Unix epoch seconds)."""
    catalog.refresh()
    now_ms = int(now * 1000)
    for partition in list(catalog.numbers):
        spec = catalog.specs[partition.topic]
        with database.lock:
            if "delete" in spec.cleanup and (spec.retention_ms >= 0 or spec.retention_bytes >= 0):
                with database.write():
                    catalog.refresh()
                    if partition in catalog.numbers:
                        _retain(database, chunks, catalog.row(partition), spec, now_ms)
            if "compact" in spec.cleanup:
                with database.write():
                    catalog.refresh()
                    if partition in catalog.numbers:
                        _compact(chunks, partition, catalog.row(partition), spec, now_ms)
    chunks.collect()


def _retain(database: Database, chunks: ChunkTable, known: PartitionRow, spec: TopicSpec, now_ms: int) -> None:
    """Whole chunks from the oldest on, by the rules of ``embedded.retention.expired``."""
    rows = chunks.rows(known.number)
    size = sum(row.size for row in rows)
    last = None
    for row in rows:
        old = spec.retention_ms >= 0 and row.newest_ms < now_ms - spec.retention_ms
        much = spec.retention_bytes >= 0 and size - row.size >= spec.retention_bytes
        if not (old or much):
            break
        size -= row.size
        last = row.last
    if last is not None:
        chunks.delete(known.number, last)
        database.execute("UPDATE partitions SET start = ? WHERE id = ?", (last + 1, known.number))


def _compact(chunks: ChunkTable, partition: TopicPartition, known: PartitionRow, spec: TopicSpec, now_ms: int) -> None:
    rows = chunks.rows(known.number)
    entries: list[Entry] = []
    for row in rows:
        records, _ = chunks.read(partition, known.number, row.first, row.last + 1)
        entries += [Entry(r.offset, r.timestamp_ms, r.key, r.value is None) for r in records]
    gone = superseded(entries, spec, now_ms=now_ms, end=known.bounds.end)
    for row in rows:
        if gone and not gone.isdisjoint(range(row.first, row.last + 1)):
            records, _ = chunks.read(partition, known.number, row.first, row.last + 1)
            chunks.replace(row, [r for r in records if r.offset not in gone])
