"""What can be set about the clients of one cluster: the one place where it stands, with its defaults.

``laminar.streams.open.KafkaLogConfig`` is the part of it that a run file can set; a test holds the two together.

>>> KafkaSettings(bootstrap="127.0.0.1:9092", request_timeout_s=5.0).outage_s
120.0
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laminar.schemas.errors import ConfigError
from laminar.streams.bootstrap import check_bootstrap
from laminar.streams.kafka.client_names import CLIENT_NAMES

__all__ = ["ClientSettings", "GroupProtocol", "KafkaSettings", "closest_name"]

GroupProtocol = Literal["consumer", "classic"]
ClientSettings = Mapping[str, str | int | float | bool]

_OURS = frozenset(
    {
        "bootstrap.servers",
        "metadata.broker.list",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "transactional.id",
        "enable.idempotence",
        "acks",
        "request.required.acks",
        "enable.auto.commit",
        "auto.commit.enable",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "auto.offset.reset",
        "isolation.level",
        "partitioner",
        "logger",
        "error_cb",
    }
)
"""The promises of the port rest on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Raises ConfigError when a value cannot be right."""

    bootstrap: str
    """``host:port`` of some brokers, separated by commas."""
    client: ClientSettings = field(default_factory=dict, repr=False)
    """librdkafka's own settings, for example ``sasl.username``; never printed."""
    group_protocol: GroupProtocol = "consumer"
    """``consumer`` (KIP-848) or ``classic``; what they mean for members: see KafkaConsumer."""
    request_timeout_s: float = 15.0
    """How long any one call may wait for a broker."""
    transaction_timeout_s: float = 30.0
    """After this the broker aborts an open transaction whose owner is gone, and fences an owner that is merely slow."""
    session_timeout_s: float = 6.0
    """Silence after which a member counts as dead; classic protocol only, with the other it is the broker's setting."""
    poll_interval_s: float = 300.0
    """A member that does not poll for so long is put out of its group."""
    outage_s: float = 120.0
    """poll raises Unavailable when no broker has answered for so long."""
    compression: str = "zstd"
    replication_factor: int = -1
    """Of created topics; -1 = the broker's default."""
    max_record_bytes: int = 64 * 1024 * 1024
    partitions: Mapping[str, int] = field(default_factory=dict)
    """Topics of which a key always belongs to one of so many partitions. They may have more: partitions that somebody
    adds to a run's topic are read like the others, but move no key, so what is written of one key stays in order."""

    def __post_init__(self) -> None:
        try:
            check_bootstrap(self.bootstrap)
        except ValueError as error:
            raise ConfigError(f"log.bootstrap: {error}") from None
        refused = sorted(_OURS & self.client.keys())
        if refused:
            raise ConfigError(f"log.client.{refused[0]}: is set by laminar itself")
        if self.request_timeout_s >= self.transaction_timeout_s:
            raise ConfigError(
                f"log: request_timeout_s ({self.request_timeout_s:g}) must be below transaction_timeout_s "
                f"({self.transaction_timeout_s:g})"
            )


def closest_name(name: str) -> str:
    """What a setting of librdkafka that does not exist may have meant, as the end of a message; or nothing."""
    close = difflib.get_close_matches(name.lower().replace("_", "."), CLIENT_NAMES, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
