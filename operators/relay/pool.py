"""Which slot is written next: a free one, a new one, or that of the oldest version. Not thread-safe (see SlotStore)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laminar.operators.relay.slot import Slot, allocate, leased
from laminar.schemas.errors import ConfigError, Unavailable
from laminar.schemas.records import VersionManifest

__all__ = ["Entry", "SlotPool"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """What the relay knows about one slot."""

    slot: Slot
    state: Literal["free", "staged", "sealing", "sealed", "filling", "adopting"] = "free"
    nonce: str = ""
    manifest: VersionManifest | None = None
    verified: int = 0
    """Leading chunks that match the manifest."""

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and version: what is newer."""
        return (self.manifest.epoch, self.manifest.version) if self.manifest else (-1, -1)


class SlotPool:
    """The slots of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: list[Entry] = []

    def take(self, size: int) -> Entry:
        """A slot that nobody leases, with at least ``size`` bytes.

        Raises ConfigError (shared memory too small), Unavailable (what would make room is being read or written).
        """
        idle = [e for e in self.entries if e.state in ("free", "staged") and not leased(e.slot.data)]
        for entry in idle:
            self.free(entry)
        best = max(idle, key=lambda e: e.slot.capacity(), default=None)
        entry = best or self._new()
        try:
            allocate(entry.slot.data, size)
        except ConfigError as error:
            if best is None:
                self.entries.remove(entry)
            return self._evict(size, error)
        return entry

    def free(self, entry: Entry) -> None:
        """Forget what the slot holds. Who has leased it goes on reading."""
        entry.slot.free()
        entry.slot.manifest.unlink(missing_ok=True)
        entry.state, entry.nonce, entry.manifest, entry.verified = "free", "", None, 0

    def sealed_by_age(self) -> list[Entry]:
        """Sealed versions, oldest first."""
        return sorted((e for e in self.entries if e.state == "sealed"), key=lambda e: e.order)

    def _new(self) -> Entry:
        used = {e.slot.index for e in self.entries}
        entry = Entry(Slot(self._folder, next(i for i in range(len(used) + 1) if i not in used)))
        self.entries.append(entry)
        return entry

    def _evict(self, size: int, full: ConfigError) -> Entry:
        """Make room by dropping old versions, never the newest one."""
        for entry in self.sealed_by_age()[:-1]:
            if leased(entry.slot.data):
                continue
            _log.warning("version %d is dropped early: %s", entry.order[1], full)
            self.free(entry)
            if leased(entry.slot.data):  # a reader came between; after the note is gone none can
                continue
            try:
                allocate(entry.slot.data, size)
            except ConfigError:
                entry.slot.data.unlink(missing_ok=True)
                self.entries.remove(entry)
                continue
            return entry
        if any(leased(e.slot.data) for e in self.entries):
            raise Unavailable(f"every slot is being read or written, and no further one fits: {full}")
        raise full
