"""Opens a log from its settings; the adapter is imported only here, and only the one that is asked for.

>>> open_log(SqliteLogConfig(path=Path("runs/first/log")), run_id="first")              # doctest: +SKIP
>>> open_log(KafkaLogConfig(bootstrap="127.0.0.1:9092"), run_id="first")                # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from laminar.schemas.errors import ConfigError
from laminar.streams.bootstrap import check_bootstrap
from laminar.streams.log import Log
from laminar.streams.namespace import NamespacedLog
from laminar.streams.registry import RegistryConfig
from laminar.streams.secret import FromEnvironment, FromFile
from laminar.streams.topics import topic_specs

if TYPE_CHECKING:
    from laminar.schemas.codec import Codec

__all__ = ["KafkaLogConfig", "LogConfig", "MemoryLogConfig", "SqliteLogConfig", "open_codec", "open_log"]


class _LogSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    partitions: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Partitions of a topic, where they differ from the catalogue: ``{prompts: 16}``."""


class SqliteLogConfig(_LogSettings):
    """The embedded log: one database on a local disk, several processes."""

    kind: Literal["sqlite"] = "sqlite"
    path: Path | None = None
    """Folder of the log; by default ``log`` in the run's folder."""
    durability: Literal["normal", "full"] = "normal"
    """``normal`` keeps every commit over a kill -9, ``full`` over a power failure too."""
    session_timeout_s: float = Field(default=10.0, gt=0)
    """A group member that does not poll for this long is taken for dead, and others get its partitions."""
    request_timeout_s: float = Field(default=15.0, gt=0)
    """How long a write may wait for those of other processes."""


class KafkaLogConfig(_LogSettings):
    """A Kafka cluster."""

    kind: Literal["kafka"] = "kafka"
    bootstrap: str = "127.0.0.1:9092"
    """``host:port`` of some brokers, separated by commas."""
    topic_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]*$")
    """Put before the name of each topic, so that runs can share a cluster; null: the run's name and a dot."""
    group_protocol: Literal["consumer", "classic"] = "consumer"
    """``consumer`` is KIP-848 (brokers from 4.0); ``classic`` serves older ones."""
    request_timeout_s: float = Field(default=15.0, gt=0)
    """How long any one call may wait for a broker."""
    transaction_timeout_s: float = Field(default=30.0, gt=0)
    """After this the broker aborts an open transaction whose owner is gone."""
    session_timeout_s: float = Field(default=6.0, gt=0)
    """Silence after which a group member counts as dead; ``classic`` only, otherwise it is the broker's setting."""
    outage_s: float = Field(default=120.0, gt=0)
    """A process ends, for its supervisor, when no broker has answered for so long."""
    compression: Literal["zstd", "lz4", "snappy", "gzip", "none"] = "zstd"
    replication_factor: int = Field(default=-1, ge=-1)
    """Of created topics; -1 = the broker's default."""
    client: dict[str, str | int | float | bool | FromEnvironment | FromFile] = {}
    """Settings of librdkafka as they are, for example ``sasl.username``; secrets by where they stand:
    ``sasl.password: {env: KAFKA_PASSWORD}`` or ``{file: PATH}``."""
    registry: RegistryConfig | None = None
    """A schema registry: with one, records are written in its wire format; read is what either way was written."""

    @field_validator("bootstrap")
    @classmethod
    def _check_bootstrap(cls, value: str) -> str:
        check_bootstrap(value)
        return value


class MemoryLogConfig(_LogSettings):
    """A log inside one process, for tests and simulation."""

    kind: Literal["memory"] = "memory"


LogConfig = Annotated[SqliteLogConfig | KafkaLogConfig | MemoryLogConfig, Field(discriminator="kind")]


def open_log(config: SqliteLogConfig | KafkaLogConfig | MemoryLogConfig, *, run_id: str) -> Log:
    """The log of these settings, for this run.

    Raises ConfigError, TopicMismatch (another run's log), Unavailable or DeadlineExceeded, naming the folder or broker.
    """
    if isinstance(config, SqliteLogConfig):
        if config.path is None:
            raise ConfigError("log.path: missing (the run file's folder gives the default)")
        from laminar.streams.sqlite import SqliteLog

        return SqliteLog(
            config.path,
            owner=run_id,
            durability=config.durability,
            session_timeout_s=config.session_timeout_s,
            request_timeout_s=config.request_timeout_s,
        )
    if isinstance(config, KafkaLogConfig):
        from laminar.streams.kafka import KafkaLog

        settings = config.model_dump(exclude={"kind", "partitions", "bootstrap", "topic_prefix", "registry", "client"})
        prefix = f"{run_id}." if config.topic_prefix is None else config.topic_prefix
        partitions = {prefix + spec.name: spec.partitions for spec in topic_specs(config.partitions)}
        client = {
            name: value.read(f"log.client.{name}") if isinstance(value, FromEnvironment | FromFile) else value
            for name, value in config.client.items()
        }
        return NamespacedLog(KafkaLog(config.bootstrap, client=client, partitions=partitions, **settings), prefix)
    from laminar.streams.memory import MemoryLog

    return MemoryLog()


def open_codec(config: SqliteLogConfig | KafkaLogConfig | MemoryLogConfig) -> Codec:
    """The codec for the records of this log. A registry is not asked before the first record (or ``prepare``).

    Raises ConfigError for a registry's settings that cannot be right, or without the packages that it needs.
    """
    from laminar.schemas.codec import Codec

    if isinstance(config, KafkaLogConfig) and config.registry is not None:
        from laminar.streams.registry.client import SchemaRegistry

        return Codec(registry=SchemaRegistry(config.registry))
    return Codec()
