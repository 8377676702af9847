"""Which partition a key belongs to: murmur2, as Kafka's Java client, so that every adapter and every client agrees.

>>> partition_of(b"9f3a/0/17", 8)
2
"""

from __future__ import annotations

import struct
from functools import lru_cache

__all__ = ["murmur2", "partition_of"]

_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """32-bit murmur2 with Kafka's seed, unsigned."""
    length = len(data)
    h = (0x9747B28C ^ length) & _MASK
    words = length >> 2
    for word in struct.unpack_from(f"<{words}I", data):
        k = word * _M & _MASK
        h = (h * _M ^ (k ^ k >> 24) * _M) & _MASK
    if length & 3:
        h = (h ^ int.from_bytes(data[words * 4 :], "little")) * _M & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


@lru_cache(maxsize=8192)
def partition_of(key: bytes, partitions: int) -> int:
    """The partition in 0 .. partitions - 1 of a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
