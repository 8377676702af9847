"""What can be set about a schema registry: ``log.registry`` of a run file."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from laminar.streams.secret import FromEnvironment, FromFile

__all__ = ["Compatibility", "RegistryConfig"]

Compatibility = Literal[
    "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE"
]


class RegistryConfig(BaseModel):
    """A schema registry with the API of Confluent's (Apicurio: under ``/apis/ccompat/v7``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str
    """``https://host:port/path``; several, tried in turn, with commas between."""
    timeout_s: float = Field(default=10.0, gt=0)
    """How long the registry may take: at the start for all schemas together, later for an id that was not met before.
    It is asked again until then."""
    register_schemas: bool = True
    """Register what is missing. False: what is missing is an error, and nothing is written to the registry."""
    compatibility: Compatibility | None = "FULL_TRANSITIVE"
    """Set on our subjects that have none of their own, when they are registered; null: leave it to the registry."""
    client: dict[str, bool | int | float | str | FromEnvironment | FromFile] = {}
    """Settings of confluent-kafka's SchemaRegistryClient as they are, such as ``ssl.ca.location``; secrets by where
    they stand: ``basic.auth.user.info: {env: REGISTRY_LOGIN}`` or ``{file: PATH}``."""

    @model_validator(mode="after")
    def _check_url(self) -> RegistryConfig:
        for url in self.url.split(","):
            try:
                parts = urlsplit(url.strip())
                host, user, _ = parts.hostname, parts.username, parts.port
            except ValueError:
                raise ValueError("url is not valid (an example: http://127.0.0.1:8081)") from None
            if user is not None:
                raise ValueError("url must not carry a login: use client: {basic.auth.user.info: {env: NAME}}")
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError(
                    "url must begin with http:// or https:// and a host (an example: http://127.0.0.1:8081)"
                )
        return self
