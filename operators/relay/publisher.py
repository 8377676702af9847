"""The trainer's side of the relay: copy into its shared memory, seal, go on.

The time of a publication is that of one copy and one digest pass; readers, other relays and retention add nothing.
A slot survives its relay: when the relay restarts between stage and seal, seal finds it again and goes on.

>>> publisher = RelayPublisher.from_context(context)                          # doctest: +SKIP
>>> prepared = publisher.stage(tensors, tied={}, epoch=1, version=7, parent=6, step=7,
...                            deadline=Deadline.after(60, "publish version 7"))
>>> committed = publisher.seal(prepared, Deadline.after(60, "seal version 7"))  # after `prepared` is on the log
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from laminar.operators.operator import Context
from laminar.operators.relay.client import RelayClient
from laminar.operators.relay.directory import RelayDirectory
from laminar.operators.relay.folder import is_here
from laminar.operators.relay.manifest import ALIGNMENT, check, label, root_digest
from laminar.operators.relay.slot import Lease, Mappings, Slot, lease
from laminar.operators.relay.token import run_token
from laminar.operators.relay.writer import SlotWriter
from laminar.operators.weights import NamedTensor
from laminar.schemas.errors import DeadlineExceeded, Retryable, Unavailable, WeightsMismatch
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["RelayPublisher"]

_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_SILENT_MS = 5000
"""A relay without a heartbeat for so long is only tried when there is no other."""
_FIRST_BYTES = 64 * 1024 * 1024
"""Reserved for tensors of unknown total size; the slot grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    slot: int
    nonce: str
    relay_id: str
    lease: Lease


class RelayPublisher:
    """Implements WeightPublisher over the relay of this machine."""

    def __init__(self, context: Context, *, token: str, read_timeout_s: float = 10.0, hash_threads: int = 2) -> None:
        self._context = context
        self._token = token
        self._timeout_s = read_timeout_s
        self._directory = RelayDirectory(context)
        self._hashing = ThreadPoolExecutor(hash_threads, thread_name_prefix="publish-hash")
        self._staged: dict[tuple[int, int], _Staged] = {}
        self._mappings = Mappings()
        self._last_bytes = 0
        self._last: VersionManifest | None = None

    @classmethod
    def from_context(cls, context: Context) -> RelayPublisher:
        """A publisher with the run's token (LAMINAR_RELAY_TOKEN, or ``relay.token`` in the run's folder)."""
        return cls(context, token=run_token(context.run.run_dir))

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
        """See WeightPublisher.stage. ``tensors`` may be a sequence or a generator (then the slot grows with it).

        Raises DeadlineExceeded or Unavailable naming the relay, Fenced (a newer epoch publishes), ConfigError
        (shared memory too small), WeightsMismatch (the tensors and the tied names do not agree).
        """
        self._drop_staged()
        size = _size_of(tensors) if isinstance(tensors, Sequence) else (self._last_bytes or _FIRST_BYTES)
        staged, path, chunk_bytes, status, boot = self._reserve(epoch, version, max(size, 1), deadline)
        self._staged[(epoch, version)] = staged
        writer = SlotWriter(path, self._mappings, chunk_bytes=chunk_bytes, pool=self._hashing, deadline=deadline)
        try:
            for tensor in tensors:
                writer.add(tensor)
            digests = writer.finish()
            manifest = VersionManifest(
                run_id=self._context.run.run_id,
                epoch=epoch,
                version=version,
                parent=parent,
                step=step,
                state="prepared",
                tensors=tuple(writer.tensors),
                total_bytes=writer.total_bytes,
                chunk_bytes=chunk_bytes,
                chunk_digests=digests,
                root_digest=root_digest(digests),
                tied=dict(tied),
                relay_id=staged.relay_id,
                relay_url=status.url,
                relay_boot=boot,
                at_ms=self._now_ms(),
                meta=self._same_as_last(root_digest(digests), version),
            )
            check(manifest)
        except BaseException:
            writer.close()
            self._drop_staged()
            raise
        writer.close()
        self._last_bytes, self._last = manifest.total_bytes, manifest
        return manifest

    def seal(self, manifest: VersionManifest, deadline: Deadline) -> VersionManifest:
        """See WeightPublisher.seal. Raises Unavailable when the slot is lost: stage again."""
        staged = self._staged.get((manifest.epoch, manifest.version))
        if staged is None:
            raise Unavailable(f"{label(manifest)} is not staged by this process; stage it again")
        while True:
            status = self._directory.refresh().get(staged.relay_id)
            try:
                if status is None:
                    raise Unavailable(f"relay {staged.relay_id}: no heartbeat")
                if not is_here(status):
                    raise Unavailable(f"relay {staged.relay_id} ({status.url}) is gone or restarting")
                with closing(self._client(status)) as client:
                    answer = client.seal(staged.slot, staged.nonce, manifest, deadline)
            except Retryable as error:
                if "stage it again" in str(error):
                    self._drop_staged()
                    raise
                self._wait(error, deadline)
                continue
            self._drop_staged()
            return dataclasses.replace(
                manifest,
                state="committed",
                relay_url=str(answer["url"]),
                relay_boot=str(answer["boot_id"]),
                at_ms=self._now_ms(),
            )

    def close(self) -> None:
        """Give up what is staged and not sealed."""
        self._drop_staged()
        self._directory.close()
        self._hashing.shutdown(wait=False)
        self._mappings.close()

    def _reserve(
        self, epoch: int, version: int, size: int, deadline: Deadline
    ) -> tuple[_Staged, Path, int, RelayStatus, str]:
        while True:
            try:
                status = self._local()
                with closing(self._client(status)) as client:
                    answer = client.reserve(epoch=epoch, version=version, total_bytes=size, deadline=deadline)
                path = Path(str(answer["path"]))
                held = lease(path)
                note = Slot(path.parent, int(answer["slot"])).note()
                if note is None or note.nonce != answer["nonce"]:
                    held.close()
                    raise Unavailable(f"relay {status.relay_id}: slot {answer['slot']} was given to another writer")
            except Retryable as error:
                self._wait(error, deadline)
                continue
            staged = _Staged(slot=int(answer["slot"]), nonce=str(answer["nonce"]), relay_id=status.relay_id, lease=held)
            return staged, path, int(answer["chunk_bytes"]), status, str(answer["boot_id"])

    def _local(self) -> RelayStatus:
        """The relay whose memory this process can map. Raises Unavailable, naming those that it cannot."""
        relays = self._directory.refresh()
        silent_ms = self._now_ms() - _SILENT_MS
        here = sorted((s for s in relays.values() if is_here(s)), key=lambda s: (s.at_ms < silent_ms, s.relay_id))
        if here:
            return here[0]
        seen = ", ".join(f"{s.relay_id} ({s.url})" for s in relays.values()) or "none has announced itself"
        raise Unavailable(f"no relay on this machine (known relays: {seen})")

    def _client(self, status: RelayStatus) -> RelayClient:
        return RelayClient(status.relay_id, status.url, self._token, read_timeout_s=self._timeout_s)

    def _wait(self, error: Retryable, deadline: Deadline) -> None:
        if isinstance(error, DeadlineExceeded) or deadline.remaining() < _RETRY_S:
            raise deadline.exceeded(str(error)) from error
        time.sleep(_RETRY_S)

    def _drop_staged(self) -> None:
        for staged in self._staged.values():
            staged.lease.close()
        self._staged.clear()

    def _same_as_last(self, root: str, version: int) -> dict[str, str]:
        if self._last is None or self._last.root_digest != root or self._last.version == version:
            return {}
        _log.warning("version %d has exactly the bytes of version %d: nothing was learned", version, self._last.version)
        return {"identical_to": str(self._last.version)}

    def _now_ms(self) -> int:
        return int(self._context.clock() * 1000)


def _size_of(tensors: Sequence[NamedTensor]) -> int:
    if not tensors:
        raise WeightsMismatch("no tensors to publish")
    return sum(-(-t.data.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors)
