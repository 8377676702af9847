"""What can be set about a relay.

>>> RelayConfig().keep_versions
3
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from laminar.operators.operator import OperatorConfig

__all__ = ["RelayConfig"]


class RelayConfig(OperatorConfig):
    """One relay process per machine: it keeps the newest weights in shared memory and serves them."""

    kind: Literal["relay"] = "relay"
    host: str = "127.0.0.1"
    """Address to listen on. ``0.0.0.0`` where relays or rollouts run on other machines."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 = any free port; peers learn it from the relay's heartbeat."""
    advertise: str = ""
    """Host name in the announced URL; empty: ``host``, or this machine's name when ``host`` means all addresses."""
    shm_root: Path = Path("/dev/shm")  # noqa: S108 - shared memory, not a temporary folder
    """Where the relay makes its folder of slots; must be a memory file system to be fast."""
    shm_dir: Path | None = None
    """The folder of slots itself; default: ``{shm_root}/laminar-{run id}-{instance}-{hash of the run folder}``."""
    keep_versions: int = Field(default=3, ge=1)
    """Newest versions to keep. Each costs the weights' size in shared memory, and one more is being written."""
    chunk_bytes: int = Field(default=4 * 1024 * 1024, ge=4096)
    """Unit of digests, of forwarding and of resuming."""
    hash_threads: int = Field(default=2, ge=1)
    """Threads that verify a version before it is served."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two records on ``relays.status``; a change is announced at once."""
    dead_after_s: float = Field(default=5.0, gt=0)
    """A relay without a heartbeat for so long is skipped in the chain."""
    read_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one read from a peer, and of one chunk."""
    stall_timeout_s: float = Field(default=5.0, gt=0)
    """A peer that verifies no new chunk for so long is skipped for a while."""
    pull_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one attempt to pull a version; the next attempt goes on at the first missing chunk."""
    nearly_done: float = Field(default=0.8, ge=0, le=1)
    """A pull of a superseded version is finished rather than abandoned when this share of it is here."""
    zone: str = ""
    """Relays of one zone stand side by side in the chain, so that a version enters a zone once."""
    max_connections: int = Field(default=64, ge=1)
    """Connections served at once; further ones are answered 503."""
    stale_after_s: float = Field(default=600.0, gt=0)
    """Slot folders of other runs whose relay and supervisor are gone for so long are removed at start."""
