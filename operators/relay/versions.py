"""Which version is the newest committed one: folded from ``weights.versions``."""

from __future__ import annotations

import logging

from laminar.operators.operator import Context
from laminar.schemas.errors import DecodeError
from laminar.schemas.records import VersionManifest
from laminar.streams.log import TopicPartition

__all__ = ["VersionFollower"]

_log = logging.getLogger(__name__)

_TOPIC = "weights.versions"
_MAX_RECORDS = 100


class VersionFollower:
    """Reads manifests. A manifest of an older epoch is void once a newer epoch has written one. Not thread-safe."""

    def __init__(self, context: Context) -> None:
        self._codec = context.codec
        self._reader = context.log.reader()
        self._assigned = False
        self._epoch = -1
        self.newest: VersionManifest | None = None
        """The newest committed manifest of the newest epoch; while that has none yet, of the epoch before."""

    def poll(self) -> bool:
        """Read what there is; True when ``newest`` changed."""
        if not self._assigned:
            partition = TopicPartition(_TOPIC, 0)
            self._reader.assign({partition: self._reader.bounds(partition).start})
            self._assigned = True
        before = self.newest
        while records := self._reader.poll(_MAX_RECORDS, 0.0):
            for record in records:
                if record.value is None:
                    continue
                try:
                    manifest = self._codec.decode(record.value)
                except DecodeError as error:
                    _log.warning("%s is skipped: %s", record.where, error)
                    continue
                if isinstance(manifest, VersionManifest):
                    self._fold(manifest)
        return self.newest is not before

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _fold(self, manifest: VersionManifest) -> None:
        if manifest.epoch < self._epoch:
            return
        self._epoch = manifest.epoch
        if manifest.state != "committed":
            return
        newest = self.newest
        if newest is None or (manifest.epoch, manifest.version) > (newest.epoch, newest.version):
            self.newest = manifest
