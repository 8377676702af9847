"""Records to framed bytes and back.

A frame (``framing.py``) says which schema wrote the record: Avro's single-object encoding, or with a schema registry
the registry's wire format. So each record says by itself what it is, and every schema version in ``schemas/avro/``
decodes to today's record class. What was framed the other way is read too.

Guarantees: what ``encode`` returns obeys the record's rules; ``decode`` returns a record that obeys them or raises
DecodeError, in time and memory proportional to the bytes that it was given, whatever they claim about themselves. A
registry is asked once for each schema, never for a record.

>>> from laminar.schemas.records import DrainCommand
>>> codec = Codec()
>>> command = DrainCommand(rollout_id="rollout-0", incarnation=1, at_ms=2)
>>> codec.decode(codec.encode(command)) == command
True
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from laminar.schemas import framing
from laminar.schemas.binary import Part, WriteRecord, compile_writer
from laminar.schemas.errors import DecodeError, EncodeError, InvalidRecord
from laminar.schemas.framing import Registry, Written
from laminar.schemas.plain import builder
from laminar.schemas.records import Record
from laminar.schemas.rules import check_record
from laminar.schemas.schema_set import PACKAGED, SchemaSet

__all__ = ["RECORDS", "Codec"]

RECORDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Record)}
"""Every record class that may stand on a topic, by name."""

_AVRO_ERRORS = (EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError)
"""What fastavro raises on values or bytes that do not fit the schema."""


class Codec:
    """Encodes and decodes every record type. Holds caches only; safe to share between threads."""

    def __init__(self, newer_schemas: Path | None = None, *, registry: Registry | None = None) -> None:
        """``newer_schemas``: a folder of schema files of a newer release, so that its records decode too;
        ``registry``: what is written carries its schema ids."""
        self._schemas = PACKAGED if newer_schemas is None else SchemaSet(newer_schemas)
        self._registry = registry
        self._writers: dict[type, tuple[bytes, WriteRecord]] = {}
        """Record class -> its frame's header, and what writes the rest."""
        self._written: dict[bytes, Written] = {}
        """Header -> what it says, of those that were met."""

    def prepare(self) -> None:
        """Make ready to write and read every record: ask the registry for all ids at once. Without one, nothing.

        Raises ConfigError, Unavailable.
        """
        if self._registry is not None:
            self._learn_writers(*RECORDS.values())

    def encode(self, record: Record, decoded: tuple[Record, bytes] | None = None) -> bytes:
        """The framed bytes. Raises EncodeError, naming the field, when the record breaks a rule.

        ``decoded``: what ``decode`` made of which bytes; where the record holds it as a field, those bytes are taken
        as they are, and are not checked again: what was changed inside it since, in its ``meta``, is not written (use
        ``dataclasses.replace``). With a registry that was not asked before (``prepare``): also
        ConfigError, Unavailable.
        """
        known = self._writers.get(type(record))
        if known is None:
            known = self._learn_writers(type(record))
        header, write = known
        parts = [header]
        part = None if decoded is None else self._part(*decoded)
        try:
            write(record, parts.append, part)
        except InvalidRecord as error:
            raise EncodeError(f"{type(record).__name__}{error}") from None
        try:
            check_record(record, None if part is None else part.record)
        except InvalidRecord as error:
            raise EncodeError(str(error)) from None
        return b"".join(parts)

    def _part(self, record: Record, data: bytes) -> Part | None:
        """A record that may be written as the bytes that it was read from; None if today's schema is another one."""
        written = self._written.get(_header(data))
        if written is None or written.reader is not None or written.name != type(record).__name__:
            return None
        return Part(record, self._schemas.current(written.name).full_name, data[written.header_bytes :])

    def decode(self, data: bytes) -> Record:
        """The record. Raises DecodeError for anything that is not exactly one record of a known schema.

        With a registry, the first record of a schema id also raises Unavailable (the bytes may be sound), ConfigError.
        """
        header = _header(data)
        written = self._written.get(header)
        if written is None:
            written = self._learn(header, data)
        try:
            plain = written.read(data)
        except _AVRO_ERRORS as error:
            raise DecodeError(f"{written.label}: {type(error).__name__}: {error}") from error
        try:
            record: Record = builder(RECORDS[written.name])(plain)
        except InvalidRecord as error:
            raise DecodeError(f"{written.name}{error}") from None
        try:
            check_record(record)
        except InvalidRecord as error:
            raise DecodeError(str(error)) from None
        return record

    def schema_of(self, data: bytes) -> Written | None:
        """What a frame says; None if its schema is of no record of ours, or the bytes are not framed.

        Raises what a registry raises, as ``decode`` does.
        """
        header = _header(data)
        try:
            return self._written.get(header) or self._learn(header, data)
        except DecodeError:
            return None

    def _learn_writers(self, *kinds: type) -> tuple[bytes, WriteRecord]:
        """Make ready to write these; return the last one's."""
        current: dict[type, Any] = {}
        for kind in kinds:
            if RECORDS.get(kind.__name__) is not kind:
                raise EncodeError(f"{kind.__name__} is not a record (valid: {', '.join(RECORDS)})")
            current[kind] = self._schemas.current(kind.__name__)
        if self._registry is None:
            headers = {kind: framing.fingerprint_frame(schema) for kind, schema in current.items()}
        else:
            forms = {kind: framing.registered_form(schema.whole) for kind, schema in current.items()}
            ids = self._registry.ids_of({f"{form['namespace']}.{form['name']}": form for form in forms.values()})
            headers = {kind: framing.id_frame(ids[f"{framing.NAMESPACE}.{kind.__name__}"]) for kind in kinds}
        for kind in kinds:
            schema, header = current[kind], headers[kind]
            self._writers[kind] = header, compile_writer(schema.whole, kind)
            self._written[header] = framing.written_by_file(schema, schema, len(header))
        return self._writers[kinds[-1]]

    def _learn(self, header: bytes, data: bytes) -> Written:
        """What a header says that was not met before. Raises DecodeError."""
        shown = f"{len(data)} bytes, beginning {data[:10].hex()!r}: not framed"
        if header[:2] == framing.FINGERPRINT_MARK and len(header) == framing.FINGERPRINT_BYTES:
            schema = self._schemas.by_fingerprint(header[2:])
            if schema is None or schema.name not in RECORDS:
                raise DecodeError(
                    f"schema fingerprint {header[2:].hex()}: no record of this release has it; "
                    f"a newer release may have written it"
                )
            written = framing.written_by_file(schema, self._schemas.current(schema.name))
        elif header[:1] == framing.ID_MARK and len(header) == framing.ID_BYTES:
            schema_id = framing.id_of_frame(header)
            if self._registry is None:
                raise DecodeError(
                    f"{shown} (a record begins with c301), or framed for a schema registry, schema id {schema_id}, and "
                    f"log.registry.url is not set"
                )
            written = framing.written_by_registered(schema_id, self._registry.schema_of(schema_id), RECORDS)
        else:
            raise DecodeError(f"{shown} (a record begins with c301, or with 00 and a registry's schema id)")
        self._written[header] = written
        return written


def _header(data: bytes) -> bytes:
    """The part of a frame in front of the record, whichever it is."""
    return data[: framing.ID_BYTES if data[:1] == framing.ID_MARK else framing.FINGERPRINT_BYTES]
