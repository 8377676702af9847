"""One version on its way to a reader that does something else meanwhile: pulled by a thread, into memory of its own.

The thread reads no log: its owner tells it which relays there are. It ends when the bytes are here, when no chunk came
for ``patience_s``, or when it is abandoned.

>>> arrival = Arrival(manifest, peers=lambda: relays, token=token)            # doctest: +SKIP
>>> while not arrival.done():
...     sample()
>>> memory = arrival.take()
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from laminar.operators.relay.manifest import label, n_chunks
from laminar.operators.relay.pull import Pull, Quarantine
from laminar.schemas.errors import DeadlineExceeded, LaminarError, Unavailable
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["Arrival", "Memory"]

_ALL = 2.0
"""More than the whole: an abandoned pull ends at the next chunk, however much is here."""


class Memory:
    """Room for a version, without a name on any disk, but with one in ``/proc`` while ``fd`` is open."""

    def __init__(self, manifest: VersionManifest) -> None:
        self.fd = os.memfd_create(f"laminar-version-{manifest.version}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, manifest.total_bytes)
            self.mapped = mmap.mmap(self.fd, manifest.total_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Give it back, unless somebody refers to it."""
        os.close(self.fd)
        with suppress(BufferError):
            self.mapped.close()


class Arrival:
    """See the module's docstring. Its methods belong to the owner's thread."""

    def __init__(
        self,
        manifest: VersionManifest,
        *,
        peers: Callable[[], Sequence[RelayStatus]],
        token: str,
        quarantine: Quarantine,
        patience_s: float,
        read_timeout_s: float = 10.0,
        stall_timeout_s: float = 5.0,
    ) -> None:
        """``peers`` is called by the thread, and ``quarantine`` is its own until it is ``done``."""
        self.manifest = manifest
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._abandoned = False
        self._outcome: Memory | LaminarError | None = None
        self._thread = threading.Thread(
            target=self._run,
            kwargs={
                "peers": peers,
                "token": token,
                "quarantine": quarantine,
                "read_timeout_s": read_timeout_s,
                "stall_timeout_s": stall_timeout_s,
            },
            name="weights-pull",
            daemon=True,
        )
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return not self._thread.is_alive()

    def take(self) -> Memory:
        """Once it is done: the version's memory, which is the caller's. Raises what the pull raised."""
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Memory):
            return outcome
        raise outcome or Unavailable(f"{label(self.manifest)}: the pull was abandoned")

    def abandon(self) -> None:
        """Let it end at its next chunk, and its memory go."""
        with self._lock:
            self._abandoned = True
            outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Memory):
            outcome.close()

    def _run(self, **how: Any) -> None:
        outcome: Memory | LaminarError
        try:
            outcome = self._pulled(**how)
        except LaminarError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - raised again in the owner's thread
            outcome = Unavailable(f"{label(self.manifest)}: {type(error).__name__}: {error}")
        with self._lock:
            if not self._abandoned:
                self._outcome = outcome
                return
        if isinstance(outcome, Memory):
            outcome.close()

    def _pulled(self, **how: Any) -> Memory:
        memory = Memory(self.manifest)
        try:
            with memoryview(memory.mapped) as data:
                pull = Pull(
                    manifest=self.manifest, data=data, wanted=lambda: not self._abandoned, nearly_done=_ALL, **how
                )
                while pull.have < n_chunks(self.manifest):
                    before = pull.have
                    try:
                        pull.run(Deadline.after(self._patience_s, f"pull of {label(self.manifest)}"))
                    except DeadlineExceeded:
                        if pull.have == before:
                            raise
        except BaseException:
            memory.close()
            raise
        return memory
