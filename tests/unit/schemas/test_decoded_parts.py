"""A record that holds a decoded one takes over its bytes: the same frame, for less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.schemas.codec import Codec
from laminar.schemas.errors import EncodeError
from tests.support import sample

CODEC = Codec()
DATA = CODEC.encode(sample.completed())
RECORD = CODEC.decode(DATA)


def test_the_frame_is_the_one_that_encoding_everything_gives() -> None:
    scored = sample.scored(RECORD)
    assert CODEC.encode(scored, (RECORD, DATA)) == CODEC.encode(scored)
    assert CODEC.decode(CODEC.encode(scored, (RECORD, DATA))) == scored


def test_the_bytes_are_really_taken_over() -> None:
    marked = DATA.replace(b"abc", b"xyz")
    assert b"xyz" in CODEC.encode(sample.scored(RECORD), (RECORD, marked))


def test_a_changed_record_is_encoded_anew() -> None:
    changed = replace(RECORD, text="changed")
    scored = sample.scored(changed)
    assert CODEC.decode(CODEC.encode(scored, (RECORD, DATA))) == scored


def test_what_is_not_the_decoded_record_is_still_checked() -> None:
    with pytest.raises(EncodeError, match="reward: nan is not finite"):
        CODEC.encode(sample.scored(RECORD, reward=float("nan")), (RECORD, DATA))
    broken = replace(RECORD, version_min=7, version_max=7)
    with pytest.raises(EncodeError, match="version_min"):
        CODEC.encode(sample.scored(broken), (RECORD, DATA))
    with pytest.raises(EncodeError, match="function"):
        CODEC.encode(sample.scored(RECORD, function=3), (RECORD, DATA))


def test_bytes_of_another_record_or_schema_are_not_taken_over() -> None:
    scored = sample.scored(RECORD)
    other = CODEC.encode(scored)
    assert CODEC.encode(scored, (RECORD, other)) == other
    assert CODEC.encode(scored, (RECORD, b"\xc3\x01 no such schema")) == other


def test_what_was_changed_inside_the_decoded_record_is_not_written() -> None:
    read = CODEC.decode(DATA)
    read.meta["verdict"] = "fine"  # type: ignore[union-attr]
    written = CODEC.decode(CODEC.encode(sample.scored(read), (read, DATA)))
    assert written.trajectory == RECORD  # type: ignore[union-attr]
    renewed = replace(read, meta={**read.meta})  # type: ignore[union-attr, type-var]
    written = CODEC.decode(CODEC.encode(sample.scored(renewed), (read, DATA)))
    assert written.trajectory.meta["verdict"] == "fine"  # type: ignore[union-attr]
