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

from laminar.schemas.errors import Fatal, LaminarError, TopicMismatch, Unavailable
from laminar.streams.deadline import Deadline

__all__ = ["Database", "Durability"]

Durability = Literal["normal", "full"]
"""``normal``: what was committed survives kill -9 of any process. ``full``: a loss of power too (fsync per commit)."""

_FORMAT = "1"
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_RETRY_S = (0.0005, 0.004)
"""How long to wait for other processes before the next try; SQLite's own handler soon sleeps for 100 ms."""
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
        try:
            self._db = sqlite3.connect(
                file, isolation_level=None, check_same_thread=False, timeout=0.0, cached_statements=256
            )
        except sqlite3.Error as error:
            raise self._ours(error, "open") from error
        try:
            self._set_up(owner)
        except BaseException:
            self._db.close()
            raise

    def version(self) -> tuple[int, int]:
        """Changes with every commit of anybody."""
        with self.lock:
            return self.rows("PRAGMA data_version")[0][0], self.writes

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query."""
        with self.lock:
            deadline: Deadline | None = None
            while True:
                try:
                    return self._db.execute(sql, values).fetchall()
                except sqlite3.Error as error:
                    deadline = deadline or Deadline.after(self._timeout_s, f"read {self._file}")
                    self._wait_if_busy(error, "read", deadline)

    def row(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """The first row, or None."""
        found = self.rows(sql, values)
        return found[0] if found else None

    @contextmanager
    def stream(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Iterator[Any]]:
        """Rows one by one; the statement is over when the block is."""
        with self.lock:
            cursor = self._db.cursor()
            try:
                yield cursor.execute(sql, values)
            except sqlite3.Error as error:
                raise self._ours(error, "read") from error
            finally:
                cursor.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads inside see one state."""
        with self.lock:
            self._end_interrupted()
            self.rows("BEGIN")
            try:
                yield
            finally:
                self._db.rollback()

    @contextmanager
    def write(self, deadline: Deadline | None = None) -> Iterator[None]:
        """A write transaction, alone among all processes. Raises DeadlineExceeded, Unavailable: nothing happened."""
        with self.lock:
            self._end_interrupted()
            self._begin(deadline or Deadline.after(self._timeout_s, f"write {self._file}"))
            try:
                yield
                self.execute("COMMIT")
            except BaseException:
                self._db.rollback()
                raise
            self.writes += 1

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """One statement, inside ``write``."""
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise self._ours(error, "write") from error

    def execute_many(self, sql: str, values: Sequence[Sequence[Any]]) -> None:
        """One statement for each row of values, inside ``write``."""
        try:
            self._db.executemany(sql, values)
        except sqlite3.Error as error:
            raise self._ours(error, "write") from error

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._db.close()

    def _begin(self, deadline: Deadline) -> None:
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                self._wait_if_busy(error, "write", deadline)
            else:
                return

    def _end_interrupted(self) -> None:
        """A signal handler's exception may have come between a begin and its try."""
        if self._db.in_transaction:
            self._db.rollback()

    def _wait_if_busy(self, error: sqlite3.Error, what: str, deadline: Deadline) -> None:
        """Wait a little when another process is in the way; raise ours for everything else."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _BUSY:
            raise self._ours(error, what) from error
        if deadline.passed:
            raise deadline.exceeded(f"{self._file} is locked by another process") from error
        time.sleep(random.uniform(*_RETRY_S))

    def _ours(self, error: sqlite3.Error, what: str) -> LaminarError:
        kind = Unavailable if isinstance(error, sqlite3.OperationalError) else Fatal
        return kind(f"{what} {self._file}: {error}")

    def _set_up(self, owner: str | None) -> None:
        if self.row("PRAGMA page_count")[0] == 0:
            self.rows("PRAGMA page_size = 8192")
        for pragma in ("journal_mode = WAL", f"synchronous = {self.durability}", "journal_size_limit = 67108864"):
            self.rows(f"PRAGMA {pragma}")
        if self.row("SELECT 1 FROM sqlite_master WHERE name = 'producers'") is None:
            with self.write():
                for statement in _TABLES.split(";"):
                    self.execute(statement)
                self.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?), ('catalog', '0')", (_FORMAT,))
        known = dict(self.rows("SELECT key, value FROM meta"))
        if known["format"] != _FORMAT:
            raise TopicMismatch(f"{self._file}: written in format {known['format']}, this version reads {_FORMAT}")
        if owner is None:
            return
        if "owner" not in known:
            with self.write():
                self.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (owner,))
        belongs = self.row("SELECT value FROM meta WHERE key = 'owner'")[0]
        if belongs != owner:
            raise TopicMismatch(f"{self._file}: this log belongs to run {belongs!r}, not to {owner!r}")
