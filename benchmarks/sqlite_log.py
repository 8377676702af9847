"""What the SQLite log costs beside a plain SQLite insert loop of the same batches.

``python -m benchmarks.sqlite_log [--quick]``. Both write the same keys and values, one transaction a batch, with the
same page size, write-ahead log and ``synchronous=NORMAL``. The loop fills one table (key, time, value) and knows
nothing of partitions, offsets, fencing or limits. Reading: everything, in order, from a fresh handle. The claims are
about batches; transactions of a single record stand in the table, because there the fixed cost of a commit shows.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.sqlite import SqliteLog

GOAL = 0.7
PARTITIONS = 4
MEMBERS = 8
"""Records of one key: the members of a group, as on the real topic."""


@dataclass(frozen=True)
class Case:
    """One size of records."""

    name: str
    value_bytes: int
    per_batch: int
    batches: int

    @property
    def records(self) -> int:
        """Records in all."""
        return self.per_batch * self.batches


CASES = (
    Case("1 KB", 1_000, 200, 150),
    Case("1 KB", 1_000, 1, 2000),
    Case("10 KB", 10_000, 50, 100),
    Case("1 MB", 1_000_000, 4, 40),
)


def batches(case: Case) -> list[list[OutRecord]]:
    """What both sides write. Values differ, so that nothing is cached by chance."""
    noise = os.urandom(case.value_bytes + 4096)
    made: Iterator[OutRecord] = (
        OutRecord(
            topic="trajectories.completed",
            key=b"9f3a51/0/%d" % (i // MEMBERS),
            value=noise[i % 4096 : i % 4096 + case.value_bytes],
        )
        for i in range(case.records)
    )
    return [[next(made) for _ in range(case.per_batch)] for _ in range(case.batches)]


def log_write(directory: Path, work: Sequence[Sequence[OutRecord]]) -> float:
    """Seconds."""
    log = SqliteLog(directory)
    log.create_topics([TopicSpec(name="trajectories.completed", partitions=PARTITIONS)])
    producer = log.producer("bench")
    start = time.perf_counter()
    for batch in work:
        with producer.transaction() as tx:
            for record in batch:
                tx.send(record)
    seconds = time.perf_counter() - start
    log.close()
    return seconds


def log_read(directory: Path, count: int) -> float:
    """Seconds."""
    log = SqliteLog(directory)
    reader = log.reader()
    reader.assign({TopicPartition("trajectories.completed", p): 0 for p in range(PARTITIONS)})
    start = time.perf_counter()
    found = 0
    while batch := reader.poll(500, 0.0):
        found += len(batch)
    seconds = time.perf_counter() - start
    if found != count:
        raise SystemExit(f"read {found} of {count} records")
    log.close()
    return seconds


def _connect(directory: Path) -> sqlite3.Connection:
    db = sqlite3.connect(directory / "plain.sqlite", isolation_level=None)
    db.execute("PRAGMA page_size = 8192")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA journal_size_limit = 67108864")
    return db


def plain_write(directory: Path, work: Sequence[Sequence[OutRecord]]) -> float:
    """Seconds."""
    directory.mkdir()
    db = _connect(directory)
    db.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, key BLOB, timestamp_ms INTEGER, value BLOB)")
    start = time.perf_counter()
    for batch in work:
        now = int(time.time() * 1000)
        db.execute("BEGIN IMMEDIATE")
        db.executemany(
            "INSERT INTO records (key, timestamp_ms, value) VALUES (?, ?, ?)", [(r.key, now, r.value) for r in batch]
        )
        db.execute("COMMIT")
    seconds = time.perf_counter() - start
    db.close()
    return seconds


def plain_read(directory: Path, count: int) -> float:
    """Seconds."""
    db = _connect(directory)
    start = time.perf_counter()
    cursor = db.execute("SELECT id, key, timestamp_ms, value FROM records ORDER BY id")
    found = 0
    while batch := cursor.fetchmany(500):
        found += len(batch)
    seconds = time.perf_counter() - start
    if found != count:
        raise SystemExit(f"read {found} of {count} rows")
    db.close()
    return seconds


def measure(case: Case, rounds: int) -> tuple[list[object], Claim]:
    """A table row, and the claim on writing: the best round of each side, in turn; other load only ever adds."""
    work = batches(case)
    seconds: dict[str, float] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            ours, plain = Path(folder, "log"), Path(folder, "plain")
            taken = {
                "plain write": plain_write(plain, work),
                "log write": log_write(ours, work),
                "plain read": plain_read(plain, case.records),
                "log read": log_read(ours, case.records),
            }
        seconds = {name: min(value, seconds.get(name, value)) for name, value in taken.items()}
    ratio = seconds["plain write"] / seconds["log write"]
    megabytes = case.records * case.value_bytes / 1e6
    row: list[object] = [case.name, case.per_batch]
    for name in ("log write", "plain write"):
        row += [round(case.records / seconds[name]), round(megabytes / seconds[name], 1)]
    row += [ratio, round(megabytes / seconds["log read"]), round(megabytes / seconds["plain read"])]
    return row, Claim(
        name=f"sqlite_log.write.{case.name.replace(' ', '').lower()}",
        ratio=ratio,
        goal=GOAL,
        unit="x",
        lower_is_better=False,
    )


def main() -> None:
    """Measure all cases."""
    rounds = 2 if quick_from_arguments(__doc__) else 5
    measured = [measure(case, rounds) for case in CASES]
    report(
        "SQLite log, writing and reading, beside a plain SQLite loop",
        ["records", "per batch", "log/s", "MB/s", "plain/s", "MB/s", "ratio", "read MB/s", "plain read"],
        [row for row, _ in measured],
        [claim for case, (_, claim) in zip(CASES, measured, strict=True) if case.per_batch > 1],
    )


if __name__ == "__main__":
    main()
