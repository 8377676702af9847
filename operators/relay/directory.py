"""Which relays there are: the newest heartbeat of each, folded from ``relays.status``."""

from __future__ import annotations

from laminar.operators.operator import Context
from laminar.schemas.records import RelayStatus
from laminar.streams.log import TopicPartition
from laminar.streams.reading import decoded

__all__ = ["RelayDirectory"]

_TOPIC = "relays.status"
_HISTORY_MS = 600_000
_MAX_RECORDS = 1000


class RelayDirectory:
    """Reads heartbeats. Not thread-safe."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reader = context.log.reader()
        self._assigned = False
        self._relays: dict[str, RelayStatus] = {}

    def refresh(self, timeout_s: float = 0.0) -> dict[str, RelayStatus]:
        """The newest heartbeat of each relay, after reading what there is; waits for a first record if it must."""
        if not self._assigned:
            partition = TopicPartition(_TOPIC, 0)
            since = int(self._context.clock() * 1000) - _HISTORY_MS
            self._reader.assign({partition: self._reader.offset_at(partition, since)})
            self._assigned = True
        wait_s = timeout_s
        while records := self._reader.poll(_MAX_RECORDS, wait_s):
            wait_s = 0.0
            for _, status in decoded(records, self._context.codec):
                if isinstance(status, RelayStatus):
                    self._relays[status.relay_id] = status
        return dict(self._relays)

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
