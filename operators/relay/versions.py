"""Which version is the newest committed one: folded from ``weights.versions``."""

from __future__ import annotations

from collections import deque

from laminar.operators.operator import Context
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline
from laminar.streams.log import TopicPartition
from laminar.streams.reading import decoded

__all__ = ["VersionFollower"]

_PARTITION = TopicPartition("weights.versions", 0)
_MAX_RECORDS = 100
_REMEMBERED = 256


class VersionFollower:
    """Reads manifests. A manifest of an older epoch is void once a newer epoch has written one. Not thread-safe."""

    def __init__(self, context: Context) -> None:
        self._codec = context.codec
        self._reader = context.log.reader()
        self._assigned = False
        self._epoch = -1
        self.published: deque[tuple[int, int, str]] = deque(maxlen=_REMEMBERED)
        """Epoch, version and root digest of the last manifests, prepared or committed."""
        self.newest: VersionManifest | None = None
        """The newest committed manifest of the newest epoch; while that has none yet, of the epoch before."""

    def poll(self) -> bool:
        """Read what there is; True when ``newest`` changed."""
        self._assign()
        before = self.newest
        while self._read(0.0):
            pass
        return self.newest is not before

    def catch_up(self, deadline: Deadline) -> None:
        """Read up to the end as of now. Raises DeadlineExceeded."""
        self._assign()
        end = self._reader.bounds(_PARTITION).end
        while self._reader.position()[_PARTITION] < end:
            deadline.check()
            self._read(min(0.2, deadline.remaining()))

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _assign(self) -> None:
        if not self._assigned:
            self._reader.assign({_PARTITION: self._reader.bounds(_PARTITION).start})
            self._assigned = True

    def _read(self, timeout_s: float) -> bool:
        records = self._reader.poll(_MAX_RECORDS, timeout_s)
        for _, manifest in decoded(records, self._codec):
            if isinstance(manifest, VersionManifest):
                self._fold(manifest)
        return bool(records)

    def _fold(self, manifest: VersionManifest) -> None:
        self.published.append((manifest.epoch, manifest.version, manifest.root_digest))
        if manifest.epoch < self._epoch:
            return
        self._epoch = manifest.epoch
        if manifest.state != "committed":
            return
        newest = self.newest
        if newest is None or (manifest.epoch, manifest.version) > (newest.epoch, newest.version):
            self.newest = manifest
