"""The settings of a broker that is one node by itself: ``server.properties``.

>>> escaped("C:\\\\data")
'C:\\\\\\\\data'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["escaped", "one_node"]

_ONE_NODE: Mapping[str, str] = {
    # one node, so one replica of everything; few partitions of the internal topics, so that it starts quickly
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "num.network.threads": "2",
    "num.io.threads": "4",
    # a run that stood still for longer than the default of 7 days still knows what it has consumed
    "offsets.retention.minutes": "5256000",
    # topics are never created by writing to them; records may be large
    "auto.create.topics.enable": "false",
    "message.max.bytes": "134217728",
    "replica.fetch.max.bytes": "134217728",
    "socket.request.max.bytes": "209715200",
    # groups settle at once; dead members, and owners of open transactions, are noticed within seconds
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.assignment.interval.ms": "0",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


def one_node(
    *, client: str, inside: str, controller: str, data: Path, session_timeout_ms: int, protocol: str
) -> dict[str, str]:
    """All that one node needs. ``inside``: where the broker talks to itself; the same as ``client`` or unprotected."""
    own = inside != client
    listeners = f"CLIENT://{client}" + (f",INSIDE://{inside}" if own else "")
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{listeners},CONTROLLER://{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": f"CLIENT:{protocol},INSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "INSIDE" if own else "CLIENT",
        "log.dirs": str(data),
        **_ONE_NODE,
        "group.consumer.session.timeout.ms": str(session_timeout_ms),
        "group.consumer.heartbeat.interval.ms": str(max(200, session_timeout_ms // 6)),
    }


def escaped(value: str) -> str:
    """As it must stand in a file of properties."""
    return value.replace("\\", "\\\\")
