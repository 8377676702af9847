"""A schema registry behind the codec: which id a schema has, which schema an id has.

Subjects are the full names of records (``laminar.Prompt``; RecordNameStrategy): a topic carries several record types,
a record type stands on one topic, and every run's topics carry the same schemas. Why, and why FULL_TRANSITIVE:
ADR 0015.

Guarantees: a schema and an id are asked for once; an id that the registry does not have is asked for again only after a
minute. No call waits much longer than ``timeout_s``: the registry is asked again until then when it does not answer or
is overloaded, and a request that has begun may take half of it more.

>>> registry = SchemaRegistry(RegistryConfig(url="http://127.0.0.1:8081"))                          # doctest: +SKIP
>>> registry.ids_of({"laminar.Prompt": {...}})                                                      # doctest: +SKIP
{'laminar.Prompt': 7}
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from laminar.schemas.errors import ConfigError, DecodeError, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.registry.settings import RegistryConfig
from laminar.streams.secret import FromEnvironment, FromFile

__all__ = ["SchemaRegistry"]

_AGAIN_S = 0.25
_UNKNOWN_FOR_S = 60.0
_MOST_UNKNOWN = 10_000
_NOT_FOUND = frozenset({40401, 40402, 40403, 40408})
"""No such subject, version, schema, or no compatibility of its own."""
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_CHARACTERS = 300

logger = logging.getLogger(__name__)


class _NotFound(Exception):
    """The registry has no such thing; never seen outside."""


class SchemaRegistry:
    """See the module's docstring. Safe to share between threads. Nothing is asked before the first call."""

    def __init__(self, config: RegistryConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for settings that the client refuses, and without the packages that it needs."""
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, Any] = {}
        self._unknown: dict[int, float] = {}
        """Id -> when it may be asked for again."""
        self._module, self._errors = _imported()
        self._given = {
            key: value.read(f"log.registry.client.{key}") if isinstance(value, FromEnvironment | FromFile) else value
            for key, value in config.client.items()
        }
        self._open().close()

    def ids_of(self, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """See laminar.schemas.framing.Registry."""
        with self._lock:
            missing = {name: schema for name, schema in schemas.items() if name not in self._ids}
            if missing:
                deadline = self._deadline("has our schemas")
                with self._open() as client:
                    for name, schema in missing.items():
                        text = self._module.Schema(json.dumps(schema), "AVRO")
                        self._ids[name] = self._id_of(client, name, text, deadline)
            return {name: self._ids[name] for name in schemas}

    def schema_of(self, schema_id: int) -> Any:
        """See laminar.schemas.framing.Registry."""
        with self._lock:
            if schema_id not in self._schemas:
                self._schemas[schema_id] = self._fetched(schema_id)
            return self._schemas[schema_id]

    def _id_of(self, client: Any, subject: str, schema: Any, deadline: Deadline) -> int:
        try:
            found = self._ask(lambda: client.lookup_schema(subject, schema).schema_id, deadline)
        except _NotFound:
            if not self._config.register_schemas:
                raise ConfigError(
                    f"log.registry: {self._config.url} does not have this release's schema under subject {subject}, and"
                    f" log.registry.register_schemas is false (start once with true and a login that may write)"
                ) from None
            self._set_compatibility(client, subject, deadline)
            found = self._ask(lambda: client.register_schema(subject, schema), deadline, subject)
            logger.info("registered the schema of %s with %s, id %s", subject, self._config.url, found)
        if not isinstance(found, int):
            raise self._no_registry(f"it gave no id for subject {subject}")
        return found

    def _set_compatibility(self, client: Any, subject: str, deadline: Deadline) -> None:
        """Only where the subject has none; Apicurio says NONE for that. One that an administrator chose stays."""
        wanted = self._config.compatibility
        if wanted is None:
            return
        try:
            level = self._ask(lambda: client.get_compatibility(subject), deadline)
        except _NotFound:
            level = "NONE"
        if level == "NONE" != wanted:
            self._ask(lambda: client.set_compatibility(subject, wanted), deadline)
        elif level != wanted:
            logger.info("subject %s keeps its own compatibility %s (log.registry: %s)", subject, level, wanted)

    def _fetched(self, schema_id: int) -> Any:
        refused = DecodeError(
            f"schema id {schema_id}: unknown to the schema registry {self._config.url} (written with another one?)"
        )
        if self._unknown.get(schema_id, 0.0) > self._clock():
            raise refused
        try:
            with self._open() as client:
                found = self._ask(lambda: client.get_schema(schema_id), self._deadline(f"has schema id {schema_id}"))
        except _NotFound:
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._unknown.clear()
            self._unknown[schema_id] = self._clock() + _UNKNOWN_FOR_S
            raise refused from None
        if (found.schema_type or "AVRO") != "AVRO":
            return f"a schema of type {found.schema_type}"
        try:
            return json.loads(found.schema_str)
        except ValueError:
            raise self._no_registry(f"schema id {schema_id} is not JSON") from None

    def _open(self) -> Any:
        """A client. It is closed again after each use: uses are rare, and connections do not keep."""
        given = {"timeout": self._config.timeout_s / 2, "max.retries": 0, **self._given, "url": self._config.url}
        try:
            return self._module.SchemaRegistryClient(given)
        except OSError as error:
            files = ", ".join(str(value) for key, value in given.items() if key.endswith(".location"))
            raise ConfigError(
                f"log.registry.client: ssl.*.location: {error.strerror or _one_line(error)} (given: {files})"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"log.registry.client: {_one_line(error)}") from None

    def _deadline(self, what: str) -> Deadline:
        return Deadline.after(self._config.timeout_s, f"schema registry {self._config.url} {what}", self._clock)

    def _ask(self, call: Callable[[], Any], deadline: Deadline, subject: str = "") -> Any:
        """The answer. Raises _NotFound, ConfigError, and Unavailable once the deadline has passed."""
        while True:
            try:
                return call()
            except self._errors.answer as error:
                why = self._judged(error, subject)
            except self._errors.transport as error:
                why = self._untrusted(error)
            except self._errors.login as error:
                why = f"no token: {_one_line(error)}"
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._no_registry(f"{type(error).__name__}: {_one_line(error)}") from error
            if deadline.remaining() <= _AGAIN_S:
                raise Unavailable(f"{deadline.exceeded(why)}: check log.registry.url, and that the registry runs")
            time.sleep(_AGAIN_S)

    def _judged(self, error: Any, subject: str) -> str:
        """Why it is worth another try. Raises otherwise."""
        status, code, text = error.http_status_code, error.error_code, _one_line(error.error_message)
        if status == 404 and code in _NOT_FOUND:
            raise _NotFound from None
        if status in (401, 403):
            raise ConfigError(
                f"log.registry: {self._config.url} refuses the login ({status}): check log.registry.client, for example"
                f" basic.auth.user.info: {{env: NAME}} with NAME=user:password"
                + (", and that it may write" if status == 403 and self._config.register_schemas else "")
            ) from None
        if status in (409, 422) and subject:
            raise ConfigError(
                f"log.registry: {self._config.url} refuses this release's schema of subject {subject} ({status}):"
                f" {text} (another schema was registered there that ours is not compatible with: use the release that"
                f" did, or another registry)"
            ) from None
        if status in _PASSING:
            return f"it answers {status}: {text}"
        raise self._no_registry(f"it answers {status}: {text}") from None

    def _untrusted(self, error: BaseException) -> str:
        """Why it is worth another try. Raises when the certificate is the reason: time does not heal that."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLError):
                raise ConfigError(
                    f"log.registry: no secure connection to {self._config.url}: {_one_line(error)} (check"
                    f" log.registry.client: ssl.ca.location, ssl.certificate.location, ssl.key.location)"
                ) from None
            cause = cause.__cause__ or cause.__context__
        return _one_line(error) or type(error).__name__

    def _no_registry(self, reason: str) -> ConfigError:
        return ConfigError(
            f"log.registry.url: {self._config.url} does not answer as a schema registry: {reason} (Apicurio needs"
            f" /apis/ccompat/v7 behind the port)"
        )


class _Errors:
    """What the client raises."""

    def __init__(self, answer: type[Exception], transport: type[Exception], login: type[Exception]) -> None:
        self.answer = answer
        self.transport = transport
        self.login = login


def _imported() -> tuple[Any, _Errors]:
    """confluent-kafka's module, and what its client raises. Raises ConfigError without the packages that it needs."""
    try:
        module = import_module("confluent_kafka.schema_registry")
        error = import_module("confluent_kafka.schema_registry.error")
        # the client prefers httpx2 too, and only lets its exceptions through
        transport = import_module("httpx2" if find_spec("httpx2") else "httpx").TransportError
    except ImportError as missing:
        raise ConfigError(
            f"log.registry: needs a package that is not installed ({missing.name}): pip install 'laminar-rl[registry]'"
        ) from None
    return module, _Errors(error.SchemaRegistryError, transport, error.OAuthTokenError)


def _one_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_MOST_CHARACTERS] if lines else ""
