"""Frames: how a record's bytes say which schema wrote them. There are two, and a reader takes both.

* Avro's single-object encoding: ``C3 01``, then the 64-bit fingerprint of a schema that is among our files.
* The wire format of a schema registry: ``00``, then the id under which the registry has the schema, big-endian in four
  bytes. Any schema will do that Avro can resolve to ours, also one that a newer release, or somebody else, registered.

In a registry a record's name is ``laminar.Prompt``, without the version that its file has in its namespace: there a
name stays the same and its subject counts the versions. The bytes behind the frame are the same in both.

>>> registered_form({"type": "record", "namespace": "laminar.v2", "name": "X", "fields": []})["namespace"]
'laminar'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, Protocol

from laminar.schemas.errors import ConfigError, DecodeError
from laminar.schemas.schema_set import PACKAGED, AvroSchema

__all__ = [
    "FINGERPRINT_BYTES",
    "FINGERPRINT_MARK",
    "ID_BYTES",
    "ID_MARK",
    "NAMESPACE",
    "Registry",
    "Written",
    "fingerprint_frame",
    "id_frame",
    "id_of_frame",
    "registered_form",
    "written_by_file",
    "written_by_registered",
]

FINGERPRINT_MARK = b"\xc3\x01"
FINGERPRINT_BYTES = len(FINGERPRINT_MARK) + 8
ID_MARK = b"\x00"
ID_BYTES = len(ID_MARK) + 4
NAMESPACE = "laminar"
"""Of every record in a registry."""

_VERSIONED = re.compile(r"laminar\.v\d+")


class Registry(Protocol):
    """A schema registry as a codec sees it. Both calls remember what they were told, and wait only so long."""

    def ids_of(self, schemas: Mapping[str, Mapping[str, Any]]) -> Mapping[str, int]:
        """The id of each schema, by its record's full name; registers what is missing.

        Raises ConfigError (refused, or not a registry), Unavailable.
        """

    def schema_of(self, schema_id: int) -> Any:
        """The parsed JSON of a schema. Raises DecodeError when there is none, ConfigError, Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a frame says about the bytes behind it."""

    name: str
    """The record's class name."""
    label: str
    """Which schema it is, for messages."""
    schema: Any
    """The writer's, in fastavro's own form."""
    reader: Any
    """The schema to resolve to; None: the writer's is today's."""
    header_bytes: int

    def read(self, data: bytes, reader: Any = None) -> Any:
        """The record as plain values; ``reader``: resolved to this schema (parsed) instead of today's.

        Raises ValueError, and what else fastavro raises on damaged bytes.
        """
        from fastavro import schemaless_reader
        from fastavro.read import SchemaResolutionError

        body = BytesIO(data)
        body.seek(self.header_bytes)
        try:
            plain = schemaless_reader(body, self.schema, self.reader if reader is None else reader)
        except SchemaResolutionError as error:
            raise ValueError(f"cannot be resolved to the schema of this release: {error}") from error
        if body.tell() != len(data):
            raise ValueError(f"{len(data) - body.tell()} bytes follow the record")
        return plain


def fingerprint_frame(schema: AvroSchema) -> bytes:
    """The header of single-object encoding."""
    return FINGERPRINT_MARK + schema.fingerprint


def id_frame(schema_id: int) -> bytes:
    """The header of a registry's wire format."""
    return ID_MARK + schema_id.to_bytes(4, "big")


def id_of_frame(header: bytes) -> int:
    """The schema id in a registry's header."""
    return int.from_bytes(header[len(ID_MARK) : ID_BYTES], "big")


def registered_form(node: Any) -> Any:
    """A self-contained schema as it is registered: no version in any namespace.

    Raises ConfigError when it holds two versions of one nested record: there they would have one name.
    """
    return _unversioned(node, {})


def _unversioned(node: Any, seen: dict[str, str]) -> Any:
    if isinstance(node, str):
        return _VERSIONED.sub(NAMESPACE, node) if _VERSIONED.match(node) else node
    if isinstance(node, Sequence):
        return [_unversioned(branch, seen) for branch in node]
    out = {
        key: _unversioned(value, seen) if key in ("type", "items", "values") else value for key, value in node.items()
    }
    if "namespace" in node:
        if seen.setdefault(node["name"], node["namespace"]) != node["namespace"]:
            raise ConfigError(
                f"schema {node['name']}: {seen[node['name']]} and {node['namespace']} stand in one record, and a "
                f"registry could not tell them apart (let the record refer to one of them)"
            )
        out["namespace"] = NAMESPACE
    if "fields" in node:
        out["fields"] = [{**field, "type": _unversioned(field["type"], seen)} for field in node["fields"]]
    return out


def written_by_file(schema: AvroSchema, current: AvroSchema, header_bytes: int = FINGERPRINT_BYTES) -> Written:
    """A record by the schema of one of our files."""
    return Written(
        name=schema.name,
        label=f"{schema.name} v{schema.version}",
        schema=schema.parsed,
        reader=None if schema is current else current.parsed,
        header_bytes=header_bytes,
    )


def written_by_registered(schema_id: int, schema: Any, names: Mapping[str, type]) -> Written:
    """A record in a registry's wire format. Raises DecodeError when the schema is of no record of ours."""
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException

    full_name = _full_name(schema)
    namespace, _, name = full_name.rpartition(".")
    if namespace != NAMESPACE or name not in names:
        raise DecodeError(
            f"schema id {schema_id} is {full_name or 'no record'}: not a record of this release (valid: "
            f"{NAMESPACE}.{next(iter(names))} and the other records of its schemas)"
        )
    label = f"{name} of schema id {schema_id}"
    plain = _without_logical_types(schema)
    try:
        parsed = parse_schema(plain)
    except (SchemaParseException, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DecodeError(f"{label}: its schema cannot be read: {type(error).__name__}: {error}") from error
    current, reader = _current(name)
    return Written(
        name=name, label=label, schema=parsed, reader=None if plain == current else reader, header_bytes=ID_BYTES
    )


@cache
def _current(name: str) -> tuple[Any, Any]:
    """Today's schema of a record as it is registered, plain and parsed."""
    from fastavro import parse_schema

    form = registered_form(PACKAGED.current(name).whole)
    return form, parse_schema(form)


def _full_name(schema: Any) -> str:
    if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
        return ""
    name, namespace = schema["name"], schema.get("namespace")
    return name if "." in name or not isinstance(namespace, str) else f"{namespace}.{name}"


def _without_logical_types(node: Any) -> Any:
    """Ours has none, and fastavro would turn a writer's into dates and decimals."""
    if isinstance(node, Mapping):
        return {key: _without_logical_types(value) for key, value in node.items() if key != "logicalType"}
    if isinstance(node, list):
        return [_without_logical_types(item) for item in node]
    return node
