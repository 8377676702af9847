"""Records to framed bytes and back.

A frame is Avro's single-object encoding: ``C3 01``, the 64-bit fingerprint of the writer's schema, the record. So each
record says by itself what it is, and every schema version in ``schemas/avro/`` decodes to today's record class.

Guarantees: what ``encode`` returns obeys the record's rules; ``decode`` returns a record that obeys them or raises
DecodeError, in time and memory proportional to the bytes that it was given, whatever they claim about themselves.

>>> from laminar.schemas.records import DrainCommand
>>> codec = Codec()
>>> command = DrainCommand(rollout_id="rollout-0", incarnation=1, at_ms=2)
>>> codec.decode(codec.encode(command)) == command
True
"""

from __future__ import annotations

import typing
from io import BytesIO
from pathlib import Path

from laminar.schemas.binary import Write, compile_writer
from laminar.schemas.errors import DecodeError, EncodeError, InvalidRecord
from laminar.schemas.plain import builder
from laminar.schemas.records import Record
from laminar.schemas.rules import check_record
from laminar.schemas.schema_set import PACKAGED, AvroSchema, SchemaSet

__all__ = ["RECORDS", "Codec"]

_MARKER = b"\xc3\x01"
_HEADER_BYTES = len(_MARKER) + 8

RECORDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Record)}
"""Every record class that may stand on a topic, by name."""

_AVRO_ERRORS = (EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError)
"""What fastavro raises on values or bytes that do not fit the schema."""


class Codec:
    """Encodes and decodes every record type. Holds caches only; safe to share between threads."""

    def __init__(self, newer_schemas: Path | None = None) -> None:
        """``newer_schemas``: a folder of schema files of a newer release, so that its records decode too."""
        self._writers: dict[str, Write] = {}
        self._schemas = PACKAGED if newer_schemas is None else SchemaSet(newer_schemas)

    def encode(self, record: Record) -> bytes:
        """The framed bytes. Raises EncodeError, naming the field, when the record breaks a rule."""
        name = type(record).__name__
        if RECORDS.get(name) is not type(record):
            raise EncodeError(f"{name} is not a record (valid: {', '.join(RECORDS)})")
        schema = self._schemas.current(name)
        write = self._writers.get(name)
        if write is None:
            write = self._writers[name] = compile_writer(schema.whole, type(record))
        parts = [_MARKER, schema.fingerprint]
        try:
            write(record, parts.append)
        except InvalidRecord as error:
            raise EncodeError(f"{name}{error}") from None
        try:
            check_record(record)
        except InvalidRecord as error:
            raise EncodeError(str(error)) from None
        return b"".join(parts)

    def decode(self, data: bytes) -> Record:
        """The record. Raises DecodeError for anything that is not exactly one record of a known schema."""
        if data[:2] != _MARKER or len(data) < _HEADER_BYTES:
            raise DecodeError(
                f"{len(data)} bytes, beginning {data[:10].hex()!r}: not framed (a record begins with c301)"
            )
        schema = self.schema_of(data)
        if schema is None or schema.name not in RECORDS:
            raise DecodeError(
                f"schema fingerprint {data[2:_HEADER_BYTES].hex()}: no record of this release has it; "
                f"a newer release may have written it"
            )
        try:
            plain = self._read(data, schema)
        except _AVRO_ERRORS as error:
            raise DecodeError(f"{schema.name} v{schema.version}: {type(error).__name__}: {error}") from error
        try:
            record: Record = builder(RECORDS[schema.name])(plain)
        except InvalidRecord as error:
            raise DecodeError(f"{schema.name}{error}") from None
        try:
            check_record(record)
        except InvalidRecord as error:
            raise DecodeError(str(error)) from None
        return record

    def schema_of(self, data: bytes) -> AvroSchema | None:
        """The schema that a frame names; None if it is unknown or the bytes are not framed."""
        return self._schemas.by_fingerprint(data[2:_HEADER_BYTES]) if data[:2] == _MARKER else None

    def _read(self, data: bytes, schema: AvroSchema) -> object:
        from fastavro import schemaless_reader

        current = self._schemas.current(schema.name)
        body = BytesIO(data)
        body.seek(_HEADER_BYTES)
        plain = schemaless_reader(body, schema.parsed, None if schema is current else current.parsed)
        if body.tell() != len(data):
            raise ValueError(f"{len(data) - body.tell()} bytes follow the record")
        return plain
