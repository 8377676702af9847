"""The connection: pragmas, tables, write transactions with a deadline, and SQLite's errors in our words."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from laminar.schemas.errors import Fatal, TopicMismatch, Unavailable
from laminar.streams.deadline import Deadline

__all__ = ["Database", "Durability"]

Durability = Literal["normal", "full"]
"""``normal``: what was committed survives kill -9 of any process. ``full``: a loss of power too (fsync per commit)."""

_FORMAT = "1"
_BUSY_S = 0.1
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topics (name TEXT PRIMARY KEY, spec TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    start INTEGER NOT NULL DEFAULT 0, end INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, partition)
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, first INTEGER NOT NULL, records INTEGER NOT NULL, newest_ms INTEGER NOT NULL,
    size INTEGER NOT NULL, data BLOB, segment INTEGER, position INTEGER, digest INTEGER
);
CREATE INDEX IF NOT EXISTS chunks_by_segment ON chunks (segment, position) WHERE segment IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (name TEXT PRIMARY KEY, revision INTEGER NOT NULL, state TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (
    name TEXT NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (name, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producers (id TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
"""


class Database:
    """One connection. ``lock`` serialises the threads of this process that use it."""

    def __init__(self, file: Path, *, durability: Durability, owner: str | None, timeout_s: float) -> None:
        self.lock = threading.RLock()
        self.durability: Durability = durability
        self.writes = 0
        """Committed write transactions of this connection; ``PRAGMA data_version`` counts only those of others."""
        self._file = file
        self._timeout_s = timeout_s
        with self._translated("open"):
            self._db = sqlite3.connect(
                file, isolation_level=None, check_same_thread=False, timeout=_BUSY_S, cached_statements=256
            )
        try:
            with self._translated("open"):
                self._set_up(owner)
        except BaseException:
            self._db.close()
            raise

    def version(self) -> tuple[int, int]:
        """Changes with every commit of anybody."""
        with self.lock, self._translated("data_version"):
            return self._db.execute("PRAGMA data_version").fetchone()[0], self.writes

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query."""
        with self.lock:
            deadline = Deadline.after(self._timeout_s, f"read {self._file}")
            while True:
                with self._translated("read", busy_is_fine=True):
                    return self._db.execute(sql, values).fetchall()
                self._busy(deadline)

    def row(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """The first row, or None."""
        found = self.rows(sql, values)
        return found[0] if found else None

    @contextmanager
    def stream(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Iterator[Any]]:
        """Rows one by one; the statement is over when the block is."""
        with self.lock, self._translated("read"):
            cursor = self._db.execute(sql, values)
            try:
                yield cursor
            finally:
                cursor.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads inside see one state."""
        with self.lock:
            with self._translated("read"):
                self._db.execute("BEGIN")
            try:
                yield
            finally:
                with self._translated("read"):
                    self._db.execute("COMMIT")

    @contextmanager
    def write(self, deadline: Deadline | None = None) -> Iterator[None]:
        """A write transaction, alone among all processes. Raises DeadlineExceeded, Unavailable: nothing happened."""
        with self.lock:
            self._begin(deadline or Deadline.after(self._timeout_s, f"write {self._file}"))
            try:
                yield
            except BaseException:
                self._db.rollback()
                raise
            try:
                with self._translated("commit"):
                    self._db.execute("COMMIT")
            except BaseException:
                self._db.rollback()
                raise
            self.writes += 1

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """One statement, inside ``write``."""
        with self._translated("write"):
            self._db.execute(sql, values)

    def execute_many(self, sql: str, values: Sequence[Sequence[Any]]) -> None:
        """One statement for each row of values, inside ``write``."""
        with self._translated("write"):
            self._db.executemany(sql, values)

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._db.close()

    def _begin(self, deadline: Deadline) -> None:
        if self._db.in_transaction:  # a signal handler's exception came between begin and try
            self._db.rollback()
        while True:
            with self._translated("begin", busy_is_fine=True):
                self._db.execute("BEGIN IMMEDIATE")
                return
            self._busy(deadline)

    def _busy(self, deadline: Deadline) -> None:
        deadline.check(f"{self._file} is locked by another process")
        time.sleep(random.uniform(0.001, 0.005))

    @contextmanager
    def _translated(self, what: str, *, busy_is_fine: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if busy_is_fine and code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return
            raise Unavailable(f"{what} {self._file}: {error}") from error
        except sqlite3.Error as error:
            raise Fatal(f"{what} {self._file}: {error}") from error

    def _set_up(self, owner: str | None) -> None:
        deadline = Deadline.after(self._timeout_s, f"open {self._file}")
        if self._db.execute("PRAGMA page_count").fetchone()[0] == 0:
            self._db.execute("PRAGMA page_size = 8192")
        while True:
            with self._translated("open", busy_is_fine=True):
                self._db.execute("PRAGMA journal_mode = WAL")
                break
            self._busy(deadline)
        self._db.execute(f"PRAGMA synchronous = {self.durability.upper()}")
        self._db.execute("PRAGMA journal_size_limit = 67108864")
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'producers'").fetchone() is None:
            with self.write(deadline):
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?), ('catalog', '0')", (_FORMAT,))
        known = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if known["format"] != _FORMAT:
            raise TopicMismatch(f"{self._file}: written in format {known['format']}, this version reads {_FORMAT}")
        if owner is not None and "owner" not in known:
            with self.write(deadline):
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (owner,))
            known["owner"] = self._db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()[0]
        if owner is not None and known["owner"] != owner:
            raise TopicMismatch(f"{self._file}: this log belongs to run {known['owner']!r}, not to {owner!r}")
