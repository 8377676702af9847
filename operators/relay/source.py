"""The rollout's side of the relay: the verified tensors of a version, mapped or pulled.

A sealed slot on this machine is mapped without a copy, under a lease, and even while its relay is down: the files are
the truth. Elsewhere the version is pulled over HTTP into memory that has no name on any disk. While the context is
open, other processes of this user can map the same bytes by the path that each tensor carries.

``open`` waits for a version; ``fetch`` brings one near without waiting, for a reader that has other things to do: what
no relay of this machine has, or will have soon, is pulled by a thread.

Tensors are copy-on-write: nothing that a reader does to them can reach the slot. They stay valid as long as something
refers to them; the slot is not written anew before the last such reference is gone.

>>> source = RelaySource.from_context(context)                                # doctest: +SKIP
>>> with source.open(manifest, Deadline.after(60, "load version 7")) as tensors:
...     engine.load(tensors, manifest.version)
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from laminar.operators.operator import Context
from laminar.operators.relay.arrival import Arrival, Memory
from laminar.operators.relay.chain import alive, candidates
from laminar.operators.relay.directory import RelayDirectory
from laminar.operators.relay.folder import is_here
from laminar.operators.relay.manifest import check, label, tensor_views
from laminar.operators.relay.pull import Pull, Quarantine
from laminar.operators.relay.slot import Lease, Slot, lease, sealed
from laminar.operators.relay.token import run_token
from laminar.operators.weights import TensorView
from laminar.schemas.errors import Unavailable, WeightsMismatch
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["RelaySource"]

_POLL_S = 0.01
_DIRECTORY_S = 0.5


class RelaySource:
    """Implements WeightSource. Not thread-safe."""

    def __init__(
        self,
        context: Context,
        *,
        token: str,
        zone: str = "",
        map_local: bool = True,
        local_patience_s: float = 5.0,
        dead_after_s: float = 5.0,
        read_timeout_s: float = 10.0,
        stall_timeout_s: float = 5.0,
        pull_patience_s: float = 30.0,
    ) -> None:
        """``local_patience_s``: how long to wait for this machine's relay to have a version (``fetch``: to have more of
        it) before pulling past it; ``pull_patience_s``: ``fetch`` gives up a pull that has got no chunk for so long."""
        self._context = context
        self.token = token
        self._zone = zone
        self._map_local = map_local
        self._patience_s = local_patience_s
        self._dead_after_ms = int(dead_after_s * 1000)
        self._read_timeout_s = read_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._pull_patience_s = pull_patience_s
        self._directory = RelayDirectory(context)
        self._quarantine = Quarantine()
        self._relays: Mapping[str, RelayStatus] = {}
        self._next_refresh = 0.0
        self._checked: tuple[int, int, str] | None = None
        self._awaited: tuple[tuple[tuple[int, int, str], int], float] | None = None
        """What is expected on this machine, how much of it was here, and until when."""
        self._arrival: Arrival | None = None
        self._arrived: tuple[VersionManifest, Memory] | None = None

    @classmethod
    def from_context(cls, context: Context) -> RelaySource:
        """A source with the run's token (LAMINAR_RELAY_TOKEN, or ``relay.token`` in the run's folder)."""
        return cls(context, token=run_token(context.run.run_dir))

    @contextmanager
    def open(self, manifest: VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        """See WeightSource.open. The mapping has the manifest's table; tied names are in ``manifest.tied``."""
        _check(manifest)
        held = self._take_arrived(manifest)
        if held is None and self._map_local:
            held = self._local(manifest, deadline)
        if held is None:
            held = self._pulled(manifest, deadline)
        fd, mapped = held
        data = memoryview(mapped)
        views = tensor_views(manifest, data, f"/proc/{os.getpid()}/fd/{fd}")
        try:
            yield views
        finally:
            os.close(fd)
            for view in views.values():
                with suppress(BufferError):  # the reader still uses it: it keeps the mapping, and so the lease
                    view.data.release()
            with suppress(BufferError):
                data.release()
                mapped.close()

    def fetch(self, newest: VersionManifest) -> VersionManifest | None:
        """See WeightSource.fetch."""
        now = time.monotonic()
        if self._checked != _names(newest):
            _check(newest)
            self._checked = _names(newest)
        if now >= self._next_refresh:
            self._relays = self._directory.refresh()
            self._next_refresh = now + _DIRECTORY_S
        if self._arrival is not None and self._arrival.done():
            arrival, self._arrival = self._arrival, None
            self._arrived = arrival.manifest, arrival.take()
        here = [s for s in self._relays.values() if is_here(s)] if self._map_local else []
        if any(True for s in here for _ in _slots(s, newest)):
            return newest
        if self._arrived is not None:
            return self._arrived[0]
        if self._arrival is None and not self._awaits(newest, here, now):
            self._arrival = Arrival(
                newest,
                peers=lambda: self._candidates(newest),
                token=self.token,
                quarantine=self._quarantine,
                patience_s=self._pull_patience_s,
                read_timeout_s=self._read_timeout_s,
                stall_timeout_s=self._stall_timeout_s,
            )
        return None

    def close(self) -> None:
        """Release the log reader, and what is on its way."""
        if self._arrival is not None:
            self._arrival.abandon()
            self._arrival = None
        self._drop_arrived()
        self._directory.close()

    def _awaits(self, manifest: VersionManifest, here: Sequence[RelayStatus], now: float) -> bool:
        """Whether this machine's relay may still bring it: what it has of it grew within the patience."""
        if not self._map_local or not (not self._relays or any(self._may_come(manifest, s) for s in here)):
            return False
        held = [v for s in here for v in s.versions if (v.epoch, v.version) == (manifest.epoch, manifest.version)]
        so_far = (_names(manifest), max((v.chunks_verified for v in held), default=0))
        if self._awaited is None or self._awaited[0] != so_far:
            self._awaited = so_far, now + self._patience_s
        return now < self._awaited[1]

    def _take_arrived(self, manifest: VersionManifest) -> tuple[int, mmap.mmap] | None:
        """What ``fetch`` has pulled, if it is this version."""
        if self._arrived is not None and _names(self._arrived[0]) == _names(manifest):
            memory, self._arrived = self._arrived[1], None
            return memory.fd, memory.mapped
        self._drop_arrived()
        return None

    def _drop_arrived(self) -> None:
        if self._arrived is not None:
            self._arrived[1].close()
            self._arrived = None

    def _local(self, manifest: VersionManifest, deadline: Deadline) -> tuple[int, mmap.mmap] | None:
        """The version's slot on this machine, open and mapped; None: it is not here and will not be soon."""
        patience = time.monotonic() + min(self._patience_s, deadline.remaining())
        next_refresh = 0.0
        here: list[RelayStatus] = []
        known = False
        while True:
            now = time.monotonic()
            if now >= next_refresh:
                relays = self._directory.refresh()
                known = bool(relays)
                here = [s for s in relays.values() if is_here(s)]
                next_refresh = now + _DIRECTORY_S
            for status in sorted(here, key=lambda s: s.relay_id != manifest.relay_id):
                for slot in _slots(status, manifest):
                    held = _lease_of(slot, manifest)
                    if held is not None:
                        with held:
                            mapped = held.map(manifest.total_bytes)
                            return os.dup(held.fd), mapped
            may_come = not known or any(self._may_come(manifest, s) for s in here)
            if not may_come or time.monotonic() >= patience:
                return None
            time.sleep(_POLL_S)

    def _may_come(self, manifest: VersionManifest, status: RelayStatus) -> bool:
        """Whether a local relay is likely to have the version soon: it lives and holds nothing newer."""
        if self._now_ms() - status.at_ms > self._dead_after_ms:
            return False
        return all((v.epoch, v.version) <= (manifest.epoch, manifest.version) for v in status.versions)

    def _pulled(self, manifest: VersionManifest, deadline: Deadline) -> tuple[int, mmap.mmap]:
        memory = Memory(manifest)
        try:
            with memoryview(memory.mapped) as data:
                Pull(
                    manifest=manifest,
                    data=data,
                    peers=lambda: self._peers(manifest),
                    token=self.token,
                    quarantine=self._quarantine,
                    read_timeout_s=self._read_timeout_s,
                    stall_timeout_s=self._stall_timeout_s,
                ).run(deadline)
        except BaseException:
            memory.close()
            raise
        return memory.fd, memory.mapped

    def _peers(self, manifest: VersionManifest) -> Sequence[RelayStatus]:
        self._relays = self._directory.refresh()
        return self._candidates(manifest)

    def _candidates(self, manifest: VersionManifest) -> Sequence[RelayStatus]:
        """Whom to ask, of the relays known; touches no log, so the thread of a pull may call it."""
        living = alive(self._relays, now_ms=self._now_ms(), dead_after_ms=self._dead_after_ms)
        return candidates(manifest, living, me="", zone=self._zone)

    def _now_ms(self) -> int:
        return int(self._context.clock() * 1000)


def _check(manifest: VersionManifest) -> None:
    if manifest.state != "committed":
        raise WeightsMismatch(f"{label(manifest)} is {manifest.state}: only committed versions are applied")
    check(manifest)


def _names(manifest: VersionManifest) -> tuple[int, int, str]:
    return manifest.epoch, manifest.version, manifest.root_digest


def _slots(status: RelayStatus, manifest: VersionManifest) -> Iterator[Slot]:
    """The slots of this relay that hold the version."""
    return sealed(Path(status.shm_dir), manifest.epoch, manifest.version, manifest.root_digest)


def _lease_of(slot: Slot, manifest: VersionManifest) -> Lease | None:
    """A lease on the slot, if it still holds the version once the lease is taken."""
    with suppress(Unavailable):
        held = lease(slot.data)
        note = slot.note()
        if note is not None and note.state == "sealed" and note.root_digest == manifest.root_digest:
            return held
        held.close()
    return None
