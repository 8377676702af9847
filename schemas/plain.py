"""Avro's generic values (dicts, lists) to record classes: the second half of decoding.

A builder is made once per class from its type hints. It checks what a schema cannot: that ``Literal`` fields hold a
member of their set.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from laminar.schemas.errors import InvalidRecord

__all__ = ["Build", "builder"]

Build = Callable[[Any], Any]
"""A plain value to ours. Raises InvalidRecord; its message begins with the path below the value."""


@cache
def builder(kind: Any) -> Build:
    """The builder of a record class."""
    hints = typing.get_type_hints(kind)
    fields = tuple((f.name, _for_hint(hints[f.name])) for f in dataclasses.fields(kind))

    def build(plain: Any) -> Any:
        values: dict[str, Any] = {}
        for name, convert in fields:
            try:
                values[name] = convert(plain[name])
            except InvalidRecord as error:
                raise InvalidRecord(f".{name}{error}") from None
        return kind(**values)

    return build


def _for_hint(hint: Any) -> Build:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (str, bytes, int, float):
        return _same
    if origin is Literal:
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_for_hint(a) for a in arguments if a is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _for_hint(arguments[0])
        return lambda value: tuple(map(item, value))
    if origin is Mapping:
        return _same
    return builder(hint)


def _same(value: Any) -> Any:
    return value


def _one_of(members: tuple[str, ...]) -> Build:
    def check(value: Any) -> Any:
        if value not in members:
            raise InvalidRecord(f": {value!r} is not one of {', '.join(members)}")
        return value

    return check
