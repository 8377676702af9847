"""Users and permissions on a running broker, set through its admin protocol.

>>> allow("127.0.0.1:40001", "alice", "topic", "prompts", ["READ"])      # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from laminar.schemas.errors import Unavailable

__all__ = ["Operation", "Resource", "allow", "set_passwords"]

Resource = Literal["topic", "group", "transactional_id", "cluster"]
Operation = Literal["READ", "WRITE", "DESCRIBE", "CREATE", "DELETE", "ALTER", "DESCRIBE_CONFIGS", "IDEMPOTENT_WRITE"]

_REQUEST_S = 15.0


def set_passwords(bootstrap: str, users: Mapping[str, str], mechanism: str) -> None:
    """Make SCRAM users, or give them other passwords."""
    from confluent_kafka.admin import (  # type: ignore[attr-defined]
        ScramCredentialInfo,
        ScramMechanism,
        UserScramCredentialUpsertion,
    )

    kind = ScramCredentialInfo(getattr(ScramMechanism, mechanism.replace("-", "_")), 4096)
    changes = [UserScramCredentialUpsertion(name, kind, password.encode()) for name, password in users.items()]
    client = _client(bootstrap)  # named: its futures need it
    _wait(client.alter_user_scram_credentials(changes, request_timeout=_REQUEST_S).values())


def allow(
    bootstrap: str,
    user: str,
    resource: Resource,
    name: str,
    operations: Sequence[Operation],
    *,
    prefixed: bool = False,
) -> None:
    """Let a user do this with a resource, or (``prefixed``) with all whose names begin so."""
    from confluent_kafka.admin import (  # type: ignore[attr-defined]
        AclBinding,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    kinds = {
        "topic": ResourceType.TOPIC,
        "group": ResourceType.GROUP,
        "transactional_id": ResourceType.TRANSACTIONAL_ID,
        "cluster": ResourceType.BROKER,
    }
    pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
    bindings = [
        AclBinding(
            kinds[resource], name, pattern, f"User:{user}", "*", getattr(AclOperation, one), AclPermissionType.ALLOW
        )
        for one in operations
    ]
    client = _client(bootstrap)
    _wait(client.create_acls(bindings, request_timeout=_REQUEST_S).values())


def _client(bootstrap: str) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def _wait(futures: Iterable[Future[Any]]) -> None:
    from confluent_kafka import KafkaException

    for future in futures:
        try:
            future.result(_REQUEST_S + 1.0)
        except KafkaException as e:
            raise Unavailable(f"broker: cannot set users or permissions: {e.args[0].str()}") from e
