"""Fetches one version from other relays, chunk by chunk, into memory that the caller gives.

* Chunks come in order, each verified against the manifest before it counts; so it does not matter who sends them,
  and after any fault (peer dead, stalled, restarted) the transfer resumes at the first missing chunk.
* One request asks for all that is missing; the peer sends each chunk as soon as it has verified it itself, so a
  chain of relays costs one chunk's time per link and no round trips.
* Every read has a deadline. A peer that fails or stalls is passed over for a while.
* A wrong chunk is fetched again; after three the peer is quarantined until it restarts.
* Between two chunks the pull is abandoned when something newer is wanted, unless it is nearly done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar.operators.relay.client import RelayClient
from laminar.operators.relay.manifest import chunk_ok, chunk_range, label, n_chunks
from laminar.schemas.errors import LaminarError, Unavailable, WeightsMismatch
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["STRIKES", "Pull", "Quarantine", "Superseded"]

_log = logging.getLogger(__name__)

STRIKES = 3
"""Wrong chunks after which a peer is no longer asked."""

_RETRY_S = 0.1


class Superseded(Unavailable):
    """The pull was abandoned at a chunk boundary because a newer version is wanted."""


class Quarantine:
    """Counts wrong chunks per peer and boot. Shared by all pulls of a process; used by one thread at a time."""

    def __init__(self) -> None:
        self._strikes: dict[tuple[str, str], int] = {}

    def strike(self, peer: RelayStatus) -> bool:
        """Count a wrong chunk; True when the peer is quarantined from now on."""
        key = (peer.relay_id, peer.boot_id)
        self._strikes[key] = self._strikes.get(key, 0) + 1
        return self._strikes[key] >= STRIKES

    def holds(self, peer: RelayStatus) -> bool:
        """Whether the peer, in its present boot, is not to be asked."""
        return self._strikes.get((peer.relay_id, peer.boot_id), 0) >= STRIKES


@dataclass(kw_only=True)
class Pull:
    """One version on its way."""

    manifest: VersionManifest
    data: memoryview
    """``total_bytes`` of writable memory."""
    peers: Callable[[], Sequence[RelayStatus]]
    """Whom to ask, best first; called again before each attempt."""
    token: str
    quarantine: Quarantine
    have: int = 0
    """Leading chunks that are verified."""
    on_chunk: Callable[[int], None] = lambda _: None
    wanted: Callable[[], bool] = lambda: True
    """False: something newer is to be pulled instead."""
    nearly_done: float = 0.8
    read_timeout_s: float = 10.0
    stall_timeout_s: float = 5.0
    _passed_over: dict[tuple[str, str], float] = field(default_factory=dict)
    _why: str = "no relay offers it"

    def run(self, deadline: Deadline) -> None:
        """Return when every chunk is here.

        Raises Superseded, DeadlineExceeded, or WeightsMismatch when all who have it are quarantined.
        """
        while self.have < n_chunks(self.manifest):
            self._check_wanted()
            peer = self._choose()
            if peer is None:
                deadline.check(f"{label(self.manifest)}: {self._why}")
                time.sleep(min(_RETRY_S, deadline.remaining()))
                continue
            client = RelayClient(
                peer.relay_id, peer.url, self.token, boot_id=peer.boot_id, read_timeout_s=self.read_timeout_s
            )
            try:
                self._from(client, deadline)
            except Superseded:
                raise
            except WeightsMismatch as error:
                self._why = str(error)
                _log.warning("%s", error)
                if self.quarantine.strike(peer):
                    _log.error("relay %s sent %d wrong chunks and is quarantined", peer.relay_id, STRIKES)
            except LaminarError as error:
                if not deadline.passed:
                    self._why = str(error)
                deadline.check(f"{label(self.manifest)}: {self._why}")
                _log.info("%s: %s; going on at chunk %d elsewhere", label(self.manifest), error, self.have)
                self._passed_over[peer.relay_id, peer.boot_id] = time.monotonic() + self.stall_timeout_s
            finally:
                client.close()

    def _choose(self) -> RelayStatus | None:
        peers = self.peers()
        fit = [p for p in peers if not self.quarantine.holds(p)]
        if peers and not fit:
            raise WeightsMismatch(
                f"{label(self.manifest)}: every relay that offers it is quarantined "
                f"({', '.join(p.relay_id for p in peers)}); the last fault: {self._why}"
            )
        now = time.monotonic()
        return next((p for p in fit if self._passed_over.get((p.relay_id, p.boot_id), 0.0) <= now), None)

    def _from(self, client: RelayClient, deadline: Deadline) -> None:
        """Pull the rest from one peer. Raises Unavailable (fault or stall), WeightsMismatch (a wrong chunk)."""
        total = n_chunks(self.manifest)
        start = chunk_range(self.manifest, self.have)[0]
        wait_s = min(self.stall_timeout_s, deadline.remaining())
        body = client.read_range(
            self.manifest.root_digest, start, self.manifest.total_bytes, wait_s=wait_s, deadline=deadline
        )
        while self.have < total:
            self._check_wanted()
            first, end = chunk_range(self.manifest, self.have)
            with self.data[first:end] as chunk:
                body.read_into(chunk, min(self.stall_timeout_s + self.read_timeout_s, deadline.remaining()))
                good = chunk_ok(self.manifest, self.have, chunk)
            if not good:
                raise WeightsMismatch(f"{label(self.manifest)}: chunk {self.have} from {client.name} is corrupt")
            self.have += 1
            self.on_chunk(self.have)

    def _check_wanted(self) -> None:
        total = n_chunks(self.manifest)
        if self.have < self.nearly_done * total and not self.wanted():
            raise Superseded(f"{label(self.manifest)}: abandoned at chunk {self.have} of {total} for a newer one")
