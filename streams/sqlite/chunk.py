"""How records lie in a chunk: the records that one transaction wrote to one partition, up to some size.

Each record is a head followed by key, value and headers. Offsets inside a chunk grow and may have gaps where
compaction removed records.

>>> record = LogRecord(topic="t", partition=0, offset=7, timestamp_ms=1000, key=b"k", value=None)
>>> unpack(pack([record], first=5), TopicPartition("t", 0), first=5, start=0, limit=10) == [record]
True
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from laminar.streams.log import LogRecord, TopicPartition

__all__ = ["Head", "pack", "pack_headers", "unpack"]

Head = struct.Struct("<Iqiii")
"""Offset - first offset of the chunk, timestamp_ms, bytes of key and value (-1 = null), bytes of headers."""
_PAIR = struct.Struct("<II")


def pack(records: Iterable[LogRecord], first: int) -> bytes:
    """A chunk of these records; ``first``: the first offset that the chunk ever held."""
    parts: list[bytes] = []
    for r in records:
        extra = pack_headers(r.headers)
        lengths = (-1 if r.key is None else len(r.key), -1 if r.value is None else len(r.value), len(extra))
        parts += (Head.pack(r.offset - first, r.timestamp_ms, *lengths), r.key or b"", r.value or b"", extra)
    return b"".join(parts)


def unpack(data: bytes, partition: TopicPartition, *, first: int, start: int, limit: int) -> list[LogRecord]:
    """At most ``limit`` records of a chunk from offset ``start`` on."""
    found: list[LogRecord] = []
    at, size = 0, len(data)
    topic, number = partition
    head = Head.unpack_from
    while at < size and len(found) < limit:
        delta, timestamp_ms, key_bytes, value_bytes, extra_bytes = head(data, at)
        key_at = at + Head.size
        value_at = key_at + max(key_bytes, 0)
        extra_at = value_at + max(value_bytes, 0)
        at = extra_at + extra_bytes
        if first + delta < start:
            continue
        found.append(
            LogRecord(
                topic=topic,
                partition=number,
                offset=first + delta,
                timestamp_ms=timestamp_ms,
                key=None if key_bytes < 0 else data[key_at:value_at],
                value=None if value_bytes < 0 else data[value_at:extra_at],
                headers=_headers(data, extra_at, at) if extra_bytes else (),
            )
        )
    return found


def pack_headers(headers: Iterable[tuple[str, bytes]]) -> bytes:
    """Name and content of each, with their lengths."""
    parts: list[bytes] = []
    for name, content in headers:
        encoded = name.encode()
        parts += (_PAIR.pack(len(encoded), len(content)), encoded, content)
    return b"".join(parts)


def _headers(data: bytes, at: int, end: int) -> tuple[tuple[str, bytes], ...]:
    found = []
    while at < end:
        name_bytes, content_bytes = _PAIR.unpack_from(data, at)
        name_at = at + _PAIR.size
        content_at = name_at + name_bytes
        at = content_at + content_bytes
        found.append((data[name_at:content_at].decode(), data[content_at:at]))
    return tuple(found)
