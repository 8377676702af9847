"""Records to and from the plain values that Avro reads and writes.

A converter is made once per record class from its type hints. Types are checked on the way out, so that a wrong
one names its field; ``Literal`` fields are strings in Avro (a new member of a closed set needs no new schema) and are
checked both ways.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from laminar.schemas.errors import InvalidRecord

__all__ = ["Converter", "converter"]


class Converter(NamedTuple):
    """Both directions for one type. They raise InvalidRecord with a message that begins with the path below it."""

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


@cache
def converter(kind: type) -> Converter:
    """The converter of a record class."""
    hints = typing.get_type_hints(kind)
    fields = tuple((f.name, _for_hint(hints[f.name])) for f in dataclasses.fields(kind))
    outward = tuple((name, one.to_plain) for name, one in fields)
    inward = tuple((name, one.from_plain) for name, one in fields)

    def to_plain(record: Any) -> dict[str, Any]:
        if type(record) is not kind:
            raise _wrong(kind.__name__, record)
        plain: dict[str, Any] = {}
        for name, convert in outward:
            try:
                plain[name] = convert(getattr(record, name))
            except InvalidRecord as error:
                raise InvalidRecord(f".{name}{error}") from None
        return plain

    def from_plain(plain: Any) -> Any:
        values: dict[str, Any] = {}
        for name, convert in inward:
            try:
                values[name] = convert(plain[name])
            except InvalidRecord as error:
                raise InvalidRecord(f".{name}{error}") from None
        return kind(**values)

    return Converter(to_plain, from_plain)


def _for_hint(hint: Any) -> Converter:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        return _optional(_for_hint(inner))
    if origin is tuple:
        return _array(_for_hint(arguments[0]))
    if origin is Mapping:
        return _map(_for_hint(arguments[1]))
    return converter(hint)


def _wrong(expected: str, value: Any) -> InvalidRecord:
    return InvalidRecord(f": expected {expected}, got {type(value).__name__}")


def _same(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("str", value)
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise _wrong("bytes", value)
    return value


def _int(value: Any) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        raise _wrong("int", value) from None
    if not -(2**63) <= whole < 2**63:
        raise InvalidRecord(f": {whole} does not fit into 64 bits")
    return whole


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str):
        raise _wrong("float", value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong("float", value) from None


_SCALARS: dict[Any, Converter] = {
    str: Converter(_text, _same),
    bytes: Converter(_bytes, _same),
    int: Converter(_int, _same),
    float: Converter(_float, _same),
}


def _one_of(members: tuple[str, ...]) -> Converter:
    def check(value: Any) -> Any:
        if value not in members:
            raise InvalidRecord(f": {value!r} is not one of {', '.join(members)}")
        return value

    return Converter(check, check)


def _optional(inner: Converter) -> Converter:
    return Converter(
        lambda value: None if value is None else inner.to_plain(value),
        lambda value: None if value is None else inner.from_plain(value),
    )


def _array(inner: Converter) -> Converter:
    def to_plain(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            raise _wrong("tuple", value)
        return [inner.to_plain(item) for item in value]

    return Converter(to_plain, lambda value: tuple(inner.from_plain(item) for item in value))


def _map(inner: Converter) -> Converter:
    def to_plain(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong("mapping", value)
        return {_text(key): inner.to_plain(item) for key, item in value.items()}

    return Converter(to_plain, lambda value: {key: inner.from_plain(item) for key, item in value.items()})
