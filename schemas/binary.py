"""Records to Avro binary, compiled once per record from its schema.

A general writer copies each buffer of a trajectory three times and into memory that it must first grow; here they are
joined once, so that a trajectory of 32k tokens costs a third. The subset is what our schemas use: long, double, string,
bytes, arrays, maps, records and ``null`` unions. Reading stays with fastavro, which also resolves old versions.

Types are checked on the way, so that a wrong one names its field. ``Literal`` fields are strings in Avro: a new member
of a closed set needs no new schema.
"""

from __future__ import annotations

import operator
import struct
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from laminar.schemas.errors import InvalidRecord

__all__ = ["Part", "WriteRecord", "compile_writer"]

Append = Callable[[bytes], None]
Write = Callable[[Any, Append], None]
"""Appends the encoded value in parts. Raises InvalidRecord; its message begins with the path below the value."""

_DOUBLE = struct.Struct("<d").pack
_ONE_BYTE = tuple(bytes((n,)) for n in range(128))
_NULL, _PRESENT, _END = _ONE_BYTE[0], _ONE_BYTE[2], _ONE_BYTE[0]


class Part(NamedTuple):
    """A record whose encoded form is known already."""

    record: Any
    schema: str
    """Full name: ``laminar.v1.Prompt``."""
    encoded: bytes


class WriteRecord(Protocol):
    """A writer of whole records."""

    def __call__(self, value: Any, append: Append, part: Part | None = None) -> None:
        """As Write. ``part``: where the record holds exactly this one as a field, of this schema, it is not encoded."""


def compile_writer(schema: Mapping[str, Any], kind: type) -> WriteRecord:
    """The writer of a record class under a self-contained schema (nested types spelled out at their first use)."""
    write = _record(schema, kind, {})
    fields = tuple(f["name"] for f in schema["fields"])
    schemas = {f["name"]: _full_name(f["type"]) for f in schema["fields"]}
    writers = _fields(schema, kind, {})

    def write_record(value: Any, append: Append, part: Part | None = None) -> None:
        if part is None or part.schema not in schemas.values() or type(value) is not kind:
            write(value, append)
            return
        for name, write_field in zip(fields, writers, strict=True):
            inner = getattr(value, name)
            if inner is part.record and schemas[name] == part.schema:
                append(part.encoded)
                continue
            try:
                write_field(inner, append)
            except InvalidRecord as error:
                raise InvalidRecord(f".{name}{error}") from None

    return write_record


def _full_name(schema: Any) -> str:
    """Of a record's schema; empty for others."""
    return f"{schema['namespace']}.{schema['name']}" if isinstance(schema, dict) and "namespace" in schema else ""


def _record(schema: Mapping[str, Any], kind: type, named: dict[str, Write]) -> Write:
    names = tuple(f["name"] for f in schema["fields"])
    fields = tuple(zip(names, _fields(schema, kind, named), strict=True))

    def write(value: Any, append: Append) -> None:
        if type(value) is not kind:
            raise _wrong(kind.__name__, value)
        for name, write_field in fields:
            try:
                write_field(getattr(value, name), append)
            except InvalidRecord as error:
                raise InvalidRecord(f".{name}{error}") from None

    named[f"{schema['namespace']}.{schema['name']}"] = write
    return write


def _fields(schema: Mapping[str, Any], kind: type, named: dict[str, Write]) -> tuple[Write, ...]:
    """The writer of each field."""
    hints = typing.get_type_hints(kind)
    return tuple(_value(f["type"], hints.get(f["name"]), named) for f in schema["fields"])


def _value(schema: Any, hint: Any, named: dict[str, Write]) -> Write:
    if isinstance(schema, list):
        (inner,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
        return _optional(_value(schema[1], inner, named))
    if isinstance(schema, str):
        if typing.get_origin(hint) is Literal:
            return _one_of(typing.get_args(hint))
        return _PRIMITIVES.get(schema) or named[schema]
    if schema["type"] == "record":
        return _record(schema, hint, named)
    if schema["type"] == "array":
        return _array(_value(schema["items"], typing.get_args(hint)[0], named))
    return _map(_value(schema["values"], typing.get_args(hint)[1], named))


def _wrong(expected: str, value: Any) -> InvalidRecord:
    return InvalidRecord(f": expected {expected}, got {type(value).__name__}")


def _varint(number: int) -> bytes:
    """Zigzag, then seven bits a byte."""
    left = (number << 1) ^ (number >> 63)
    if left < 128:
        return _ONE_BYTE[left]
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    out.append(left)
    return bytes(out)


def _write_long(value: Any, append: Append) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong("int", value) from None
    if not -(2**63) <= number < 2**63:
        raise InvalidRecord(f": {number} does not fit into 64 bits")
    append(_varint(number))


def _write_double(value: Any, append: Append) -> None:
    try:
        append(_DOUBLE(value))
    except (struct.error, OverflowError, TypeError):
        raise _wrong("float", value) from None


def _write_bytes(value: Any, append: Append) -> None:
    if not isinstance(value, bytes):
        raise _wrong("bytes", value)
    append(_varint(len(value)))
    append(value)


def _write_string(value: Any, append: Append) -> None:
    if not isinstance(value, str):
        raise _wrong("str", value)
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f": {error}") from None
    append(_varint(len(encoded)))
    append(encoded)


_PRIMITIVES: dict[str, Write] = {
    "long": _write_long,
    "double": _write_double,
    "bytes": _write_bytes,
    "string": _write_string,
}


def _one_of(members: tuple[str, ...]) -> Write:
    def write(value: Any, append: Append) -> None:
        if value not in members:
            raise InvalidRecord(f": {value!r} is not one of {', '.join(members)}")
        _write_string(value, append)

    return write


def _optional(inner: Write) -> Write:
    def write(value: Any, append: Append) -> None:
        if value is None:
            append(_NULL)
        else:
            append(_PRESENT)
            inner(value, append)

    return write


def _array(inner: Write) -> Write:
    def write(value: Any, append: Append) -> None:
        if not isinstance(value, tuple):
            raise _wrong("tuple", value)
        if value:
            append(_varint(len(value)))
            for item in value:
                inner(item, append)
        append(_END)

    return write


def _map(inner: Write) -> Write:
    def write(value: Any, append: Append) -> None:
        if not isinstance(value, Mapping):
            raise _wrong("mapping", value)
        if value:
            append(_varint(len(value)))
            for key, item in value.items():
                _write_string(key, append)
                inner(item, append)
        append(_END)

    return write
