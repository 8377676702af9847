"""The relay's slots: who gets one, what is sealed in it, when it is used again. Thread-safe.

* ``reserve`` gives the trainer a slot, ``seal`` verifies it against the manifest and lets readers in.
* ``begin`` gives a slot to a pull; chunks are served to the next relay as soon as they are verified.
* The newest ``keep`` versions stay. A retired slot is recycled once nobody holds a lease on it; while one is leased
  another is allocated, so neither the trainer nor a pull ever waits for a reader.
* A restarted relay adopts sealed slots after verifying them, and lets a trainer seal what it was writing meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from laminar.operators.relay.manifest import chunk_ok, chunk_range, from_json, label, n_chunks, to_json
from laminar.operators.relay.pool import Entry, SlotPool
from laminar.operators.relay.slot import Lease, Mappings, Note, Slot, lease, leased, replace_file, slots
from laminar.schemas.errors import Fenced, Unavailable, WeightsMismatch
from laminar.schemas.records import HeldVersion, VersionManifest

__all__ = ["Fill", "OpenSlot", "Progress", "Reservation", "SlotStore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A slot to write one version into."""

    index: int
    nonce: str
    path: Path
    capacity: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a version is here."""

    verified: int
    n_chunks: int


class Fill:
    """A slot being filled by a pull: see SlotStore.begin."""

    def __init__(self, store: SlotStore, entry: Entry, manifest: VersionManifest) -> None:
        self.manifest = manifest
        self._store = store
        self._entry = entry
        self._lease = lease(entry.slot.data)
        self.data = memoryview(store._mappings.get(entry.slot.data))[: manifest.total_bytes]
        """The slot's bytes, writable."""

    @property
    def have(self) -> int:
        """Leading chunks that are verified: where to go on."""
        return self._entry.verified

    def verified(self, have: int) -> None:
        """The first ``have`` chunks are verified: serve them."""
        self._store._advance(self._entry, have)

    def close(self) -> None:
        """Seal the slot if every chunk is verified, free it otherwise."""
        self.data.release()
        self._store._end(self._entry)
        self._lease.close()


class OpenSlot:
    """A leased slot whose bytes are served, perhaps while they still come in."""

    def __init__(self, store: SlotStore, entry: Entry, manifest: VersionManifest) -> None:
        self._store = store
        self._entry = entry
        self._manifest = manifest
        self.lease: Lease = lease(entry.slot.data)
        self.total_bytes = manifest.total_bytes

    def verified(self, *, above: int, wait_s: float) -> int:
        """Leading bytes that are verified, as soon as they are more than ``above`` or the time is over.

        0 once the slot no longer holds the version.
        """
        return self._store._verified_bytes(self._entry, self._manifest, above, wait_s)


class SlotStore:
    """All slots of one folder, which must exist. One process owns it (see folder.claim)."""

    def __init__(self, folder: Path, *, keep: int, hash_threads: int = 2) -> None:
        self.folder = folder
        self._keep = keep
        self._changed = threading.Condition()
        self._hashing = ThreadPoolExecutor(hash_threads, thread_name_prefix="relay-hash")
        self._mappings = Mappings()
        self._pool = SlotPool(folder)
        self._entries = self._pool.entries
        self._epoch = -1
        self._closed = False
        self.generation = 0
        """Grows when a version comes or goes."""

    # -- what the trainer does

    def reserve(self, *, epoch: int, version: int, total_bytes: int) -> Reservation:
        """A slot of at least ``total_bytes``, nobody's but the caller's once he has leased it and read his nonce.

        Raises Fenced (a newer trainer publishes), ConfigError (shared memory too small), Unavailable (all in use).
        """
        with self._changed:
            self._check_epoch(epoch, f"version {version}")
            entry = self._pool.take(total_bytes)
            entry.state, entry.nonce = "staged", uuid.uuid4().hex
            entry.slot.write_note(Note(state="staged", nonce=entry.nonce, epoch=epoch, version=version))
            return Reservation(
                index=entry.slot.index, nonce=entry.nonce, path=entry.slot.data, capacity=entry.slot.capacity()
            )

    def seal(self, index: int, nonce: str, manifest: VersionManifest) -> None:
        """Verify the slot and let readers in. Doing it twice does no harm.

        Raises WeightsMismatch (the bytes are not the manifest's), Unavailable (the reservation is gone).
        """
        with self._changed:
            entry = next((e for e in self._entries if e.slot.index == index and e.nonce == nonce), None)
            if entry and entry.state == "sealed" and entry.manifest and entry.order == _order(manifest):
                return
            self._check_epoch(manifest.epoch, label(manifest))
            if entry is None or entry.state != "staged":
                raise Unavailable(f"{label(manifest)}: slot {index} is no longer reserved for it; stage it again")
            entry.state = "sealing"
        try:
            self._verify(entry.slot, manifest)
            self._mark_sealed(entry, manifest)
        except BaseException:
            with self._changed:
                self._free(entry)
            raise

    # -- what a pull does

    def begin(self, manifest: VersionManifest) -> Fill:
        """A slot to pull this version into; what an earlier attempt verified is still there."""
        with self._changed:
            entry = self._pool.take(manifest.total_bytes)
            entry.state, entry.manifest, entry.verified, entry.nonce = "filling", manifest, 0, uuid.uuid4().hex
            note = Note(state="staged", nonce=entry.nonce, epoch=manifest.epoch, version=manifest.version)
            try:
                entry.slot.write_note(note)
                return Fill(self, entry, manifest)
            except BaseException:
                self._free(entry)
                raise

    def _advance(self, entry: Entry, have: int) -> None:
        with self._changed:
            entry.verified = have
            self._changed.notify_all()

    def _end(self, entry: Entry) -> None:
        manifest = entry.manifest
        if manifest is not None and entry.verified == n_chunks(manifest):
            self._mark_sealed(entry, manifest)
        else:
            with self._changed:
                self._free(entry)

    # -- what readers do

    def held(self) -> tuple[HeldVersion, ...]:
        """Versions that are here, whole or in part, oldest first."""
        with self._changed:
            entries = sorted((e for e in self._entries if e.state in ("sealed", "filling")), key=lambda e: e.order)
            return tuple(
                HeldVersion(
                    version=e.manifest.version,
                    epoch=e.manifest.epoch,
                    chunks_verified=e.verified,
                    n_chunks=n_chunks(e.manifest),
                )
                for e in entries
                if e.manifest is not None
            )

    def progress(self, root_digest: str, *, above: int, wait_s: float) -> Progress | None:
        """Verified chunks of a version, as soon as there are more than ``above`` or the time is over; None: unknown."""
        with self._changed:

            def ready() -> bool:
                entry = self._find(root_digest)
                return self._closed or (entry is not None and entry.verified > above)

            self._changed.wait_for(ready, timeout=wait_s)
            entry = self._find(root_digest)
            if entry is None or entry.manifest is None:
                return None
            return Progress(entry.verified, n_chunks(entry.manifest))

    def open(self, root_digest: str) -> OpenSlot | None:
        """The slot with most of these bytes, leased; None: unknown."""
        with self._changed:
            entry = self._find(root_digest)
            if entry is None or entry.manifest is None:
                return None
            return OpenSlot(self, entry, entry.manifest)

    def _verified_bytes(self, entry: Entry, manifest: VersionManifest, above: int, wait_s: float) -> int:
        with self._changed:

            def now() -> int:
                if entry.manifest is not manifest or self._closed:
                    return 0
                return chunk_range(manifest, entry.verified - 1)[1] if entry.verified else 0

            self._changed.wait_for(lambda: entry.manifest is not manifest or self._closed or now() > above, wait_s)
            return now()

    def has(self, manifest: VersionManifest) -> bool:
        """Whether the version is sealed here."""
        with self._changed:
            return any(e.state == "sealed" and e.order == _order(manifest) for e in self._entries)

    # -- life

    def enlist(self, published: Collection[tuple[int, int, str]]) -> None:
        """List the slots that an earlier process left: sealed ones wait for ``adopt``, those being written go on.

        ``published``: (epoch, version, root digest) of the run's manifests; a slot that is none of these is freed
        (the run's folder was made anew, or its trainer died before it wrote the manifest).
        """
        with self._changed:
            for slot in slots(self.folder):
                note = slot.note()
                entry = Entry(slot)
                self._entries.append(entry)
                if note and note.state == "sealed" and note.names in published:
                    entry.state, entry.nonce = "adopting", note.nonce
                elif note and note.state == "staged" and leased(slot.data):
                    entry.state, entry.nonce = "staged", note.nonce
                else:
                    slot.free()

    def adopt(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Verify what ``enlist`` found sealed, newest first, and serve it. May run in a thread."""
        with self._changed:
            waiting = [e for e in self._entries if e.state == "adopting"]
        for entry in sorted(waiting, key=lambda e: e.slot.data.stat().st_mtime, reverse=True):
            if stop():
                return
            self._adopt(entry)

    def writing(self) -> bool:
        """Whether a trainer is writing or sealing a version now."""
        with self._changed:
            return any(e.state == "sealing" or (e.state == "staged" and leased(e.slot.data)) for e in self._entries)

    def _adopt(self, entry: Entry) -> None:
        try:
            manifest = from_json(json.loads(entry.slot.manifest.read_bytes()))
            self._verify(entry.slot, manifest)
        except (OSError, ValueError, WeightsMismatch, Unavailable) as error:
            _log.warning("slot %d left by an earlier relay is dropped: %s", entry.slot.index, error)
            with self._changed:
                self._free(entry)
        else:
            self._mark_sealed(entry, manifest)

    def close(self) -> None:
        """Wake every waiter; the files stay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._hashing.shutdown(wait=True, cancel_futures=True)
        self._mappings.close()

    # -- inside

    def _find(self, root_digest: str) -> Entry | None:
        """The entry with most of these bytes."""
        found = [
            e
            for e in self._entries
            if e.state in ("sealed", "filling") and e.manifest and e.manifest.root_digest == root_digest
        ]
        return max(found, key=lambda e: e.verified, default=None)

    def _check_epoch(self, epoch: int, what: str) -> None:
        if epoch < self._epoch:
            raise Fenced(f"{what}: its trainer's epoch {epoch} is over, epoch {self._epoch} publishes here")

    def _free(self, entry: Entry) -> None:
        self._pool.free(entry)
        self._notify()

    def _mark_sealed(self, entry: Entry, manifest: VersionManifest) -> None:
        with self._changed:
            replace_file(entry.slot.manifest, json.dumps(to_json(manifest)).encode())
            entry.slot.write_note(
                Note(
                    state="sealed",
                    nonce=entry.nonce,
                    epoch=manifest.epoch,
                    version=manifest.version,
                    root_digest=manifest.root_digest,
                )
            )
            entry.state, entry.manifest, entry.verified = "sealed", manifest, n_chunks(manifest)
            self._epoch = max(self._epoch, manifest.epoch)
            for old in self._pool.sealed_by_age()[: -self._keep]:
                self._pool.free(old)
            self._notify()

    def _verify(self, slot: Slot, manifest: VersionManifest) -> None:
        with self._changed:
            mapped = self._mappings.get(slot.data)
        if len(mapped) < manifest.total_bytes:
            raise WeightsMismatch(f"{label(manifest)}: slot {slot.index} has only {len(mapped)} bytes")
        with memoryview(mapped) as data:

            def bad(index: int) -> bool:
                start, stop = chunk_range(manifest, index)
                with data[start:stop] as chunk:
                    return not chunk_ok(manifest, index, chunk)

            wrong = [i for i, is_bad in enumerate(self._hashing.map(bad, range(n_chunks(manifest)))) if is_bad]
        if wrong:
            raise WeightsMismatch(
                f"{label(manifest)}: {len(wrong)} of {n_chunks(manifest)} chunks in slot {slot.index} do not match "
                f"their digests, the first is {wrong[0]}"
            )

    def _notify(self) -> None:
        self.generation += 1
        self._changed.notify_all()


def _order(manifest: VersionManifest) -> tuple[int, int]:
    return manifest.epoch, manifest.version
