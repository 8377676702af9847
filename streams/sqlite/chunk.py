"""How records lie in a chunk: the records that one transaction wrote to one partition, up to some size.

Each record is a head (offset - first offset of the chunk, timestamp, lengths; -1 = null) followed by key, value and
headers. Offsets inside a chunk grow and may have gaps where compaction removed records.

>>> data = b"".join(pack([(7, 1000, b"k", None, ())], first=7))
>>> [(r.offset, r.key, r.value) for r in unpack(data, TopicPartition("t", 0), first=7, start=0, limit=10)]
[(7, b'k', None)]
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from laminar.streams.log import LogRecord, TopicPartition

__all__ = ["HEAD_BYTES", "Packed", "pack", "unpack"]

_HEAD = struct.Struct("<Iqiii")
_PAIR = struct.Struct("<II")
HEAD_BYTES = _HEAD.size

Packed = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes], ...]]
"""offset, timestamp_ms, key, value, headers"""


def pack(records: Iterable[Packed], first: int) -> list[bytes]:
    """The parts of a chunk, to be joined or written one after the other."""
    parts: list[bytes] = []
    head = _HEAD.pack
    for offset, timestamp_ms, key, value, headers in records:
        extra = b"".join(_header(name, content) for name, content in headers) if headers else b""
        parts.append(
            head(
                offset - first,
                timestamp_ms,
                -1 if key is None else len(key),
                -1 if value is None else len(value),
                len(extra),
            )
        )
        if key:
            parts.append(key)
        if value:
            parts.append(value)
        if extra:
            parts.append(extra)
    return parts


def unpack(data: bytes, partition: TopicPartition, *, first: int, start: int, limit: int) -> list[LogRecord]:
    """At most ``limit`` records of a chunk from offset ``start`` on."""
    found: list[LogRecord] = []
    at, size = 0, len(data)
    topic, number = partition
    head = _HEAD.unpack_from
    while at < size and len(found) < limit:
        delta, timestamp_ms, key_bytes, value_bytes, extra_bytes = head(data, at)
        key_at = at + HEAD_BYTES
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


def _header(name: str, content: bytes) -> bytes:
    encoded = name.encode()
    return _PAIR.pack(len(encoded), len(content)) + encoded + content


def _headers(data: bytes, at: int, end: int) -> tuple[tuple[str, bytes], ...]:
    found = []
    while at < end:
        name_bytes, content_bytes = _PAIR.unpack_from(data, at)
        name_at = at + _PAIR.size
        content_at = name_at + name_bytes
        at = content_at + content_bytes
        found.append((data[name_at:content_at].decode(), data[content_at:at]))
    return tuple(found)
