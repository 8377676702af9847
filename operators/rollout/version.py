"""Which policy versions there are: a fold of ``weights.versions``.

Only committed manifests count, and none of an older epoch once a newer one was seen: a trainer that was replaced and
woke up again cannot put its weights back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from laminar.schemas.codec import Codec
from laminar.schemas.records import VersionManifest
from laminar.streams.log import Log
from laminar.streams.reading import Tail, decoded

__all__ = ["Versions"]

_TOPIC = "weights.versions"
_BATCH = 64
_KEPT = 32

logger = logging.getLogger(__name__)


class Versions:
    """Follows the topic from its beginning. It keeps the newest manifests only."""

    def __init__(self, log: Log, codec: Codec) -> None:
        self._codec = codec
        self._tail = Tail(log, [_TOPIC])
        self._caught_up = False
        self._epoch = -1
        self._committed: OrderedDict[int, VersionManifest] = OrderedDict()

    def poll(self) -> bool:
        """Read what is new."""
        records = self._tail.poll(_BATCH)
        for _, manifest in decoded(records, self._codec):
            if isinstance(manifest, VersionManifest):
                self._apply(manifest)
        if not self._caught_up and not records:
            self._caught_up = not any(self._tail.behind().values())
        return bool(records)

    @property
    def newest(self) -> VersionManifest | None:
        """The newest committed version; None while there is none, or history is still being read (a version that is
        already superseded is not worth loading)."""
        return next(reversed(self._committed.values())) if self._caught_up and self._committed else None

    def get(self, version: int) -> VersionManifest | None:
        """One committed version."""
        return self._committed.get(version)

    def close(self) -> None:
        """Release the reader."""
        self._tail.close()

    def _apply(self, manifest: VersionManifest) -> None:
        if manifest.epoch < self._epoch:
            logger.warning("version %d of epoch %d is void: epoch %d", manifest.version, manifest.epoch, self._epoch)
            return
        self._epoch = manifest.epoch
        if manifest.state != "committed":
            return
        newest = next(reversed(self._committed), -1)
        if manifest.version > newest:
            self._committed[manifest.version] = manifest
            if len(self._committed) > _KEPT:
                self._committed.popitem(last=False)
