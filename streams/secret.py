"""Secrets by reference: where a process finds one, never what it is.

A setting that is a secret is written as ``{env: NAME}`` or ``{file: PATH}``; each process reads it itself when it
connects, so that no run file, command line, log or resolved configuration ever holds the value.

>>> FromEnvironment(env="KAFKA_PASSWORD").read("log.client.sasl.password")               # doctest: +SKIP
'...'
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from laminar.schemas.errors import ConfigError

__all__ = ["FromEnvironment", "FromFile", "is_secret_name"]

_ENDINGS = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "credential",
    "credentials",
    "api_key",
    "key.pem",
    "user.info",
)
_NAMES = frozenset({"sasl.oauthbearer.config", "basic.auth.user.info"})
_MAX_BYTES = 1024 * 1024


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting that is called so must never be printed."""
    last = name.lower()
    return last in _NAMES or any(last == end or last.endswith((f"_{end}", f".{end}")) for end in _ENDINGS)


class _Reference(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FromEnvironment(_Reference):
    """The value of an environment variable."""

    env: str = Field(min_length=1)
    """Its name."""

    def read(self, at: str) -> str:
        """The value. Raises ConfigError, which names the setting (``at``) and the variable."""
        value = os.environ.get(self.env)
        if value is None:
            raise ConfigError(f"{at}: the environment variable {self.env} is not set")
        if not value:
            raise ConfigError(f"{at}: the environment variable {self.env} is empty")
        return value


class FromFile(_Reference):
    """What stands in a file, without the line ends after it."""

    file: Path
    """Its path."""

    def read(self, at: str) -> str:
        """The value. Raises ConfigError, which names the setting (``at``) and the file."""
        try:
            with self.file.open("rb") as opened:
                value = opened.read(_MAX_BYTES).decode("utf-8").rstrip("\r\n")
        except OSError as e:
            raise ConfigError(f"{at}: cannot read {self.file}: {e.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{at}: {self.file} is not UTF-8 text") from None
        if not value:
            raise ConfigError(f"{at}: {self.file} is empty")
        return value
