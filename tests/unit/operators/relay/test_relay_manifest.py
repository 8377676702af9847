from __future__ import annotations

from typing import Any

import pytest

from laminar.operators.relay import manifest as m
from laminar.schemas.errors import WeightsMismatch
from laminar.schemas.records import Probe, TensorEntry, VersionManifest


def made(**changes: Any) -> VersionManifest:
    digests = m.chunk_digest(b"\x01" * 4096) + m.chunk_digest(b"\x01" * 904)
    values: dict[str, Any] = {
        "run_id": "run",
        "epoch": 0,
        "version": 1,
        "parent": 0,
        "step": 1,
        "state": "committed",
        "tensors": (
            TensorEntry(name="a", dtype="F32", shape=(10, 100), offset=0, size=4000),
            TensorEntry(name="b", dtype="BF16", shape=(452,), offset=4096, size=904),
        ),
        "total_bytes": 5000,
        "chunk_bytes": 4096,
        "chunk_digests": digests,
        "root_digest": m.root_digest(digests),
        "tied": {"head": "a"},
        "relay_id": "relay-0",
        "relay_url": "http://127.0.0.1:1",
        "relay_boot": "boot",
        "at_ms": 0,
    }
    return VersionManifest(**{**values, **changes})


def test_chunk_digests_are_xxh3_64_little_endian() -> None:
    assert m.chunk_digest(b"") == (0x2D06800538D394C2).to_bytes(8, "little")


def test_the_last_chunk_is_shorter() -> None:
    manifest = made()
    assert m.n_chunks(manifest) == 2
    assert [m.chunk_range(manifest, i) for i in range(2)] == [(0, 4096), (4096, 5000)]
    assert m.chunk_ok(manifest, 1, memoryview(b"\x01" * 904))
    assert not m.chunk_ok(manifest, 1, memoryview(b"\x01" * 903 + b"\x00"))


def test_json_brings_the_manifest_back() -> None:
    manifest = made(meta={"k": "v"})
    assert m.from_json(m.to_json(manifest)) == manifest


def test_json_has_no_probes_so_relays_of_both_releases_take_it() -> None:
    probe = Probe(tokens=b"", lengths=b"", top_k=1, ids=b"", logprobs=b"", dtype="float32")
    plain = m.to_json(made(probes=(probe,)))
    assert plain == m.to_json(made())
    assert "probes" not in plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_digests": b"12345678"}, "8 bytes of chunk digests for 2 chunks"),
        ({"root_digest": "00"}, "root digest"),
        ({"tied": {"head": "c"}}, "'head' is tied to 'c', which is not in the table"),
        ({"tied": {"b": "a"}}, "'b' is declared as tied to 'a' but has bytes of its own"),
        ({"total_bytes": 0}, "0 bytes"),
        ({"tensors": (TensorEntry(name="a", dtype="F32", shape=(2,), offset=4996, size=8),)}, "outside of 5000"),
        ({"tensors": (TensorEntry(name="a", dtype="F32", shape=(3,), offset=0, size=8),)}, "not 12"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsMismatch, match=said):
        m.check(made(**changes))


def test_a_name_that_stands_twice_is_refused() -> None:
    first = made().tensors[0]
    with pytest.raises(WeightsMismatch, match="stands twice"):
        m.check(made(tensors=(first, first)))


@pytest.mark.parametrize("damage", [{"chunk_digests": "zz"}, {"tensors": [["a"]]}, {"surprise": 1}, {"tensors": None}])
def test_json_that_is_no_manifest_is_our_error(damage: dict[str, Any]) -> None:
    with pytest.raises(WeightsMismatch):
        m.from_json({**m.to_json(made()), **damage})


def test_views_are_slices_without_a_copy() -> None:
    data = bytearray(5000)
    views = m.tensor_views(made(), memoryview(data))
    data[4096] = 7
    assert views["b"].data[0] == 7
    assert views["b"].shape == (452,)
    assert "head" not in views
