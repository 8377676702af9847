"""The relay without bytes: it holds the last versions, stalls, and loses one when it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from laminar.operators.weights import NamedTensor, TensorView
from laminar.schemas.errors import DeadlineExceeded, Unavailable
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["Relay", "RelayEnd"]

_KEPT = 3
_JOURNEYS_S = (0.0, 0.2, 2.0, 8.0)
"""For how long a version is on its way to a reader who does not wait: one of these, by the two names."""


class Relay:
    """The shared part: what is staged and what can be had."""

    def __init__(self) -> None:
        self.staged: dict[tuple[int, int], str] = {}
        """(epoch, version) -> digest of its weights."""
        self.sealed: dict[int, str] = {}
        """Version -> digest of its weights; the last few."""
        self.stalled_until = 0.0
        self.slow = False
        """While stalled: an attempt takes its whole deadline, instead of failing at once."""

    def lose_oldest(self) -> None:
        """Forget the oldest version, unless it is the only one."""
        if len(self.sealed) > 1:
            del self.sealed[min(self.sealed)]

    def lose_all(self) -> None:
        """The machine that held them is gone."""
        self.staged.clear()
        self.sealed.clear()


class RelayEnd:
    """A process's end of it: implements WeightPublisher and WeightSource."""

    def __init__(
        self,
        relay: Relay,
        run_id: str,
        reader: str,
        clock: Callable[[], float],
        point: Callable[[str], None],
        wait: Callable[[float], None],
    ) -> None:
        """``point`` is called where a process can be struck; ``wait`` lets the others go on for so many seconds."""
        self._relay = relay
        self._run_id = run_id
        self._reader = reader
        self._clock = clock
        self._point = point
        self._wait = wait
        self._coming: tuple[VersionManifest, float] | None = None
        """On its way, and when it arrives."""

    def stage(
        self,
        tensors: Iterable[NamedTensor],
        *,
        tied: Mapping[str, str],
        epoch: int,
        version: int,
        parent: int,
        step: int,
        deadline: Deadline,
    ) -> VersionManifest:
        """See WeightPublisher."""
        del tied
        self._check(deadline)
        digest = "".join(bytes(tensor.data).decode() for tensor in tensors)
        self._relay.staged[epoch, version] = digest
        self._point("stage")
        return VersionManifest(
            run_id=self._run_id,
            epoch=epoch,
            version=version,
            parent=parent,
            step=step,
            state="prepared",
            tensors=(),
            total_bytes=0,
            chunk_bytes=4096,
            chunk_digests=b"",
            root_digest=digest,
            relay_id="relay-0",
            relay_url="",
            relay_boot="boot",
            at_ms=int(self._clock() * 1000),
        )

    def seal(self, manifest: VersionManifest, deadline: Deadline) -> VersionManifest:
        """See WeightPublisher."""
        self._check(deadline)
        relay = self._relay
        relay.sealed[manifest.version] = relay.staged.pop((manifest.epoch, manifest.version), manifest.root_digest)
        for version in sorted(relay.sealed)[:-_KEPT]:
            del relay.sealed[version]
        self._point("seal")
        return replace(manifest, state="committed")

    @contextmanager
    def open(self, manifest: VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        """See WeightSource."""
        self._point("open")
        self._check(deadline)
        if manifest.version not in self._relay.sealed:
            raise Unavailable(f"version {manifest.version}: no relay has it (held: {sorted(self._relay.sealed)})")
        yield {}

    def fetch(self, newest: VersionManifest) -> VersionManifest | None:
        """See WeightSource."""
        self._point("open")
        now, relay = self._clock(), self._relay
        if now < relay.stalled_until:
            if relay.slow:
                return None
            raise Unavailable(f"version {newest.version}: the relay stalls")
        if self._coming is not None and self._coming[0].version not in relay.sealed:
            version, self._coming = self._coming[0].version, None
            raise Unavailable(f"version {version}: no relay has it any more")
        if newest.version not in relay.sealed:
            raise Unavailable(f"version {newest.version}: no relay has it (held: {sorted(relay.sealed)})")
        if self._coming is None:
            far = random.Random(f"{self._reader}/{newest.version}").choice(_JOURNEYS_S)
            self._coming = newest, now + far
        manifest, due = self._coming
        if now < due:
            return None
        self._coming = None
        return manifest

    def _check(self, deadline: Deadline) -> None:
        if self._clock() < self._relay.stalled_until:
            if self._relay.slow:
                self._wait(deadline.remaining())
                raise DeadlineExceeded(f"{deadline.name}: the relay stalls")
            raise Unavailable(f"{deadline.name}: the relay stalls")
