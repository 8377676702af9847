"""What a development broker demands of its clients: TLS, client certificates, passwords, permissions.

The broker's own traffic (with itself, and with its controller) stays on two unprotected listeners on this machine's
loopback, over which ``Broker`` also sets users and permissions: this protects against mistakes, not against
somebody on the same machine.

>>> Security(users={"alice": "..."}, authority=Authority.make(Path("certs"))).protocol      # doctest: +SKIP
'SASL_SSL'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laminar.schemas.errors import ConfigError
from laminar.streams.broker.certificate import Authority

__all__ = ["Mechanism", "Security"]

Mechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """All off by default. Passwords stand in the broker's folder, readable by its owner only."""

    authority: Authority | None = None
    """Clients connect by TLS, to a certificate that this authority signed."""
    client_certificates: bool = False
    """Clients must show a certificate of the same authority; without ``users`` its common name is who they are."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names and passwords; clients must be one of them (SASL)."""
    mechanism: Mechanism = "SCRAM-SHA-512"
    """How they prove it."""
    permissions: bool = False
    """Users may do only what ``Broker.allow`` granted them (StandardAuthorizer)."""
    super_users: tuple[str, ...] = ()
    """May do everything."""

    def __post_init__(self) -> None:
        if self.client_certificates and self.authority is None:
            raise ConfigError("broker: client certificates need TLS: give an authority")
        for name, password in self.users.items():
            if not name or any(character in name + password for character in '"\\\n;=,'):
                raise ConfigError('broker: names and passwords of users cannot have any of " \\ ; = , in them')

    @property
    def protocol(self) -> str:
        """Kafka's name for it: what clients set as ``security.protocol``."""
        secured = "SSL" if self.authority is not None else "PLAINTEXT"
        return f"SASL_{secured}" if self.users else secured

    def client(self, user: str | None = None) -> dict[str, str]:
        """The settings with which a client of this user connects (``log.client``), the password among them."""
        found = {"security.protocol": self.protocol}
        if self.authority is not None:
            found["ssl.ca.location"] = str(self.authority.trust)
        if user is not None and self.users:
            found |= {"sasl.mechanism": self.mechanism, "sasl.username": user, "sasl.password": self.users[user]}
        return found

    def properties(self, host: str) -> dict[str, str]:
        """What the broker's own settings need, for a listener called CLIENT."""
        found: dict[str, str] = {}
        if self.authority is not None:
            found |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(self.authority.issue("broker", [host, "localhost"]).store()),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.authority.trust),
                "ssl.principal.mapping.rules": r"RULE:^CN=([^,]+).*$/$1/,DEFAULT",
                # with the default, ``none`` is what SASL listeners fall back to; each listener is told apart
                "listener.name.client.ssl.client.auth": "required" if self.client_certificates else "none",
            }
        if self.users:
            found |= {"sasl.enabled.mechanisms": self.mechanism, **self._logins()}
        if self.permissions:
            supers = ["ANONYMOUS", *self.super_users]  # ANONYMOUS: the broker itself; nobody else can be
            found |= {
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": ";".join(f"User:{name}" for name in supers),
                "allow.everyone.if.no.acl.found": "false",
            }
        return found

    def _logins(self) -> dict[str, str]:
        prefix = f"listener.name.client.{self.mechanism.lower()}.sasl.jaas.config"
        if self.mechanism == "PLAIN":
            known = " ".join(f'user_{name}="{password}"' for name, password in self.users.items())
            return {prefix: f"org.apache.kafka.common.security.plain.PlainLoginModule required {known};"}
        return {prefix: "org.apache.kafka.common.security.scram.ScramLoginModule required;"}
