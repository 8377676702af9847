"""Settings of a client that may be secrets: given as they are, or by where they stand.

>>> given = {"ssl.ca.location": "/etc/ca.pem", "ssl.key.password": FromEnvironment(env="KEY_PASSWORD")}
>>> revealed(given, "log.registry.client", environ={"KEY_PASSWORD": "hush"})
{'ssl.ca.location': '/etc/ca.pem', 'ssl.key.password': 'hush'}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from laminar.schemas.errors import ConfigError

__all__ = ["ClientValue", "FromEnvironment", "FromFile", "revealed"]


class FromEnvironment(BaseModel):
    """``{env: NAME}``: the value of an environment variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    env: str = Field(min_length=1)


class FromFile(BaseModel):
    """``{file: PATH}``: what stands in a file, without the newline at its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: Path


ClientValue = bool | int | float | str | FromEnvironment | FromFile


def revealed(
    settings: Mapping[str, ClientValue], path: str, environ: Mapping[str, str] | None = None
) -> dict[str, bool | int | float | str]:
    """The settings with every value in its place. Raises ConfigError, naming ``path`` and the key, never a value."""
    values = os.environ if environ is None else environ
    return {key: _value(value, f"{path}.{key}", values) for key, value in settings.items()}


def _value(value: ClientValue, where: str, environ: Mapping[str, str]) -> bool | int | float | str:
    if isinstance(value, FromEnvironment):
        if value.env not in environ:
            raise ConfigError(f"{where}: the environment variable {value.env} is not set")
        return environ[value.env]
    if isinstance(value, FromFile):
        try:
            return value.file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{where}: cannot read {value.file}: {reason}") from None
    return value
