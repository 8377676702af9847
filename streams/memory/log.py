"""A log in this process's memory, with Kafka's semantics, the caller's clock and the caller's faults.

>>> from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
>>> log = MemoryLog()
>>> log.create_topics([TopicSpec(name="t", partitions=1)])
>>> with log.producer("p").transaction() as tx:
...     tx.send(OutRecord(topic="t", key=b"k", value=b"v"))
>>> reader = log.reader()
>>> reader.assign({TopicPartition("t", 0): 0})
>>> [r.value for r in reader.poll(10, timeout_s=0.0)]
[b'v']
"""

from __future__ import annotations

import time
from collections.abc import Callable

from laminar.streams.embedded.assignment import Assignor
from laminar.streams.embedded.log import EmbeddedLog
from laminar.streams.memory.broker import MemoryBroker
from laminar.streams.memory.faults import NO_FAULTS, Faults
from laminar.streams.memory.store import MemoryStore

__all__ = ["MemoryLog"]


class MemoryLog(EmbeddedLog):
    """One handle. Give several handles the same ``broker`` to act as several processes of one log.

    ``clock`` returns Unix epoch seconds and rules timestamps and sessions. With any clock but ``time.time`` no call
    ever waits, whatever its timeout: time does not pass by waiting then. (``blocking`` overrides that. ``sleep`` is
    called where a call would wait: a simulation lets the others go on meanwhile.)
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        broker: MemoryBroker | None = None,
        faults: Faults = NO_FAULTS,
        blocking: bool | None = None,
        sleep: Callable[[float], None] | None = None,
        assignor: Assignor = "sticky",
        session_timeout_s: float = 20.0,
        max_transaction_bytes: int = 512 * 1024 * 1024,
    ) -> None:
        self.broker = broker if broker is not None else MemoryBroker(clock, assignor=assignor)
        """What the handles share."""
        waits = self.broker.clock is time.time if blocking is None else blocking
        super().__init__(
            MemoryStore(self.broker, faults, blocking=waits, sleep=sleep),
            session_timeout_s=session_timeout_s,
            request_timeout_s=10.0,
            max_transaction_bytes=max_transaction_bytes,
        )

    def maintain(self, now: float | None = None) -> None:
        """Apply retention and compaction as if the time were ``now`` (Unix epoch seconds; None: the clock's)."""
        with self.broker.changed:
            self.broker.maintain(self.broker.clock() if now is None else now)
