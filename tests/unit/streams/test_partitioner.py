"""The partitioner agrees with Kafka's Java client."""

from __future__ import annotations

import pytest

from laminar.streams.partitioner import murmur2, partition_of


@pytest.mark.parametrize(
    ("key", "expected"),
    [  # from the Java client's own tests, where they are signed
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_gives_what_the_java_client_gives(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % 2**32
    assert partition_of(key, 7) == (expected % 2**31) % 7


def test_an_empty_key_has_a_partition() -> None:
    assert 0 <= partition_of(b"", 5) < 5
