"""What travels on the log: record classes, their Avro schemas, the codec, the errors.

>>> from laminar.schemas import Codec

The names below are loaded on first use, so that ``laminar.schemas.errors`` can be imported without numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laminar.schemas.codec import RECORDS, Codec
    from laminar.schemas.schema_set import AvroSchema, SchemaSet
    from laminar.schemas.tokens import Tokens

__all__ = ["RECORDS", "AvroSchema", "Codec", "SchemaSet", "Tokens"]

_HOMES = {
    "RECORDS": "codec",
    "Codec": "codec",
    "AvroSchema": "schema_set",
    "SchemaSet": "schema_set",
    "Tokens": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
