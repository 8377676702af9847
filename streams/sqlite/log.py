"""A durable log in one directory: one SQLite database, and segment files for large values. Several processes at once.

Guarantees: a transaction is in the log completely or not at all, whatever process is killed when; commits are fenced
by producer epoch and group ownership inside the same SQLite transaction. Local disks only.

>>> log = SqliteLog("runs/demo/log", owner="demo")                        # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from laminar.streams.embedded.assignment import Assignor
from laminar.streams.embedded.log import EmbeddedLog
from laminar.streams.sqlite.chunk_table import ChunkTable
from laminar.streams.sqlite.database import Database, Durability
from laminar.streams.sqlite.directory import prepare
from laminar.streams.sqlite.store import SqliteStore

__all__ = ["SqliteLog"]


class SqliteLog(EmbeddedLog):
    """One process's handle."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        owner: str | None = None,
        durability: Durability = "normal",
        assignor: Assignor = "sticky",
        session_timeout_s: float = 20.0,
        request_timeout_s: float = 15.0,
        max_transaction_bytes: int = 256 * 1024 * 1024,
        fetch_bytes: int = 32 * 1024 * 1024,
        maintain_every_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log in directory ``path``, and make it if need be.

        ``owner``: the run it belongs to. ``session_timeout_s``: a group member that polls less often is taken for
        dead. ``request_timeout_s``: how long a write may wait for those of other processes. ``fetch_bytes``: about
        how much a poll returns at most. ``clock``: Unix epoch seconds, for timestamps and retention.
        Raises ConfigError (not writable, network file system), TopicMismatch (another run's log), DeadlineExceeded.
        """
        directory = Path(path)
        file = directory / "log.sqlite"
        prepare(directory, file)
        database = Database(file, durability=durability, owner=owner, timeout_s=request_timeout_s)
        self._sqlite = SqliteStore(
            database,
            ChunkTable(database, directory / "segments", fetch_bytes),
            clock=clock,
            assignor=assignor,
            maintain_every_s=maintain_every_s,
        )
        super().__init__(
            self._sqlite,
            session_timeout_s=session_timeout_s,
            request_timeout_s=request_timeout_s,
            max_transaction_bytes=max_transaction_bytes,
        )

    def maintain(self, now: float | None = None) -> None:
        """Apply retention and compaction as if the time were ``now`` (Unix epoch seconds; None: the clock's)."""
        self._sqlite.maintain(self._sqlite.now() if now is None else now)
