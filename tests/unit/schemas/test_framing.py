from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import RECORDS, Codec
from laminar.schemas.errors import ConfigError, DecodeError
from laminar.schemas.framing import registered_form
from laminar.schemas.schema_set import PACKAGED
from tests.support.every_record import every_record


class Shelf:
    """A registry that is a list."""

    def __init__(self) -> None:
        self.schemas: list[Any] = []
        self.asked = 0

    def ids_of(self, schemas: Mapping[str, Mapping[str, Any]]) -> Mapping[str, int]:
        self.asked += 1
        self.schemas += schemas.values()
        return {name: self.schemas.index(schema) for name, schema in schemas.items()}

    def schema_of(self, schema_id: int) -> Any:
        self.asked += 1
        if schema_id >= len(self.schemas):
            raise DecodeError(f"no {schema_id}")
        return self.schemas[schema_id]


def test_only_the_header_differs_between_the_two_framings() -> None:
    bare, framed = Codec(), Codec(registry=Shelf())
    framed.prepare()
    for record in every_record():
        assert framed.encode(record)[:1] == b"\0"
        assert framed.encode(record)[5:] == bare.encode(record)[10:]
        assert framed.decode(framed.encode(record)) == record
        assert framed.decode(bare.encode(record)) == record


def test_each_schema_is_asked_for_once() -> None:
    shelf = Shelf()
    codec, reader = Codec(registry=shelf), Codec(registry=shelf)
    codec.prepare()
    frames = [codec.encode(record) for record in every_record() * 3]
    for frame in frames:
        codec.decode(frame)
    assert shelf.asked == 1
    for frame in frames:
        reader.decode(frame)
    assert shelf.asked == 1 + len(RECORDS)


def test_no_version_stands_in_a_registered_name() -> None:
    for name in PACKAGED.names():
        form = registered_form(PACKAGED._load(name).whole)
        assert form["namespace"] == "laminar"
        assert "laminar.v" not in str(form)


def test_two_versions_of_one_nested_record_cannot_be_registered() -> None:
    def nested(namespace: str) -> dict[str, Any]:
        return {"type": "record", "namespace": namespace, "name": "Inner", "fields": []}

    whole = {
        "type": "record",
        "namespace": "laminar.v2",
        "name": "Outer",
        "fields": [{"name": "a", "type": nested("laminar.v1")}, {"name": "b", "type": ["null", nested("laminar.v2")]}],
    }
    with pytest.raises(ConfigError, match=r"Inner: laminar.v1 and laminar.v2 stand in one record"):
        registered_form(whole)


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\0", b"\0\0\0\0\0", b"\0\0\0\0\x63rest", b"\xff" * 40])
def test_damaged_frames_are_undecodable(data: bytes) -> None:
    shelf = Shelf()
    codec = Codec(registry=shelf)
    codec.encode(r.DrainCommand(rollout_id="rollout-0", incarnation=1, at_ms=2))
    with pytest.raises(DecodeError):
        codec.decode(data)
    assert codec.schema_of(b"\xff" * 40) is None


def test_a_frame_says_whose_record_it_is() -> None:
    for codec in (Codec(), Codec(registry=Shelf())):
        for record in every_record():
            found = codec.schema_of(codec.encode(record))
            assert found is not None
            assert found.name == type(record).__name__
