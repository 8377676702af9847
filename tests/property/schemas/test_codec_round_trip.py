from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.schemas import records as r
from laminar.schemas.codec import RECORDS, Codec
from laminar.schemas.errors import DecodeError
from laminar.schemas.tokens import Tokens, ids_buffer

CODEC = Codec()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LONG = st.integers(0, 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)


@st.composite
def tokens(draw: st.DrawFn, version_min: int = 0, version_max: int = 2**31 - 1) -> Tokens:
    n = draw(st.integers(0, 6))

    def values(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=n, max_size=n))

    mask = values(st.integers(0, 1))
    versions = values(st.integers(version_min, version_max))
    logprobs = values(st.floats(min_value=-(2.0**100), max_value=0.0, width=32, allow_subnormal=False))
    return Tokens(
        n_tokens=n,
        ids=ids_buffer(values(st.integers(0, 2**31 - 1))),
        logprobs=np.asarray([p if m else np.nan for p, m in zip(logprobs, mask, strict=True)], "<f4").tobytes(),
        versions=ids_buffer([v if m else -1 for v, m in zip(versions, mask, strict=True)]),
        mask=bytes(mask),
    )


@st.composite
def probes(draw: st.DrawFn) -> r.Probe:
    n_tokens, n_prefixes, top_k = draw(st.integers(1, 6)), draw(st.integers(0, 3)), draw(st.integers(1, 4))

    def values(of: st.SearchStrategy[Any], n: int) -> list[Any]:
        return draw(st.lists(of, min_size=n, max_size=n))

    logprobs = values(st.floats(-(2.0**100), 0.0, width=32, allow_subnormal=False), n_prefixes * top_k)
    return r.Probe(
        tokens=ids_buffer(values(st.integers(0, 2**31 - 1), n_tokens)),
        lengths=ids_buffer(values(st.integers(1, n_tokens), n_prefixes)),
        top_k=top_k,
        ids=ids_buffer(values(st.integers(0, 2**31 - 1), n_prefixes * top_k)),
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        dtype=draw(TEXT),
    )


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in SPECIAL:
        return SPECIAL[hint]
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if a is types.NoneType else values_of(a) for a in arguments])
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(TEXT, values_of(arguments[1]), max_size=3)
    return st.builds(hint, **{name: values_of(of) for name, of in typing.get_type_hints(hint).items()})


SPECIAL: dict[Any, st.SearchStrategy[Any]] = {str: TEXT, bytes: st.binary(max_size=12), int: LONG, float: FINITE}
SPECIAL[Tokens] = tokens()
SPECIAL[r.Probe] = probes()


@st.composite
def prompts(draw: st.DrawFn) -> r.Prompt:
    record = draw(st.builds(r.Prompt, **{n: values_of(t) for n, t in typing.get_type_hints(r.Prompt).items()}))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
    return dataclasses.replace(
        record,
        prompt_tokens=ids_buffer(ids),
        n_prompt_tokens=len(ids),
        group_size=draw(st.integers(1, 64)),
        sampling=dataclasses.replace(record.sampling, max_tokens=draw(st.integers(1, 2**40))),
    )


def sound(record: Any, draw: st.DrawFn) -> Any:
    """The record with the fields that depend on each other made to agree."""
    match record:
        case r.TrajectoryStarted() | r.CompletedTrajectory() | r.Snapshot():
            member = draw(st.integers(0, record.prompt.group_size - 1))
            record = dataclasses.replace(
                record, member=member, trajectory_id=r.trajectory_id(record.prompt.prompt_id, member)
            )
            if isinstance(record, r.CompletedTrajectory):
                versions = record.response.versions_T[record.response.mask_T == 1]
                low, high = (int(versions.min()), int(versions.max())) if versions.size else (0, 3)
                record = dataclasses.replace(
                    record, group_id=record.prompt.prompt_id, version_min=low, version_max=high
                )
            return record
        case r.ScoredTrajectory(reward=None):
            return dataclasses.replace(record, failure=record.failure or "why")
        case r.ScoredTrajectory():
            return dataclasses.replace(record, failure=None)
        case r.TrajectoryMoved(attempt=0):
            return dataclasses.replace(record, attempt=1)
        case r.TrajectoryEnded(finish=None, error=None):
            return dataclasses.replace(record, error="why")
        case r.TrainingStep(step=0):
            return dataclasses.replace(record, step=1)
        case r.VersionManifest():
            n = len(record.chunk_digests) // 8 * 8
            fitting = tuple(t for t in record.tensors if t.offset + t.size <= record.total_bytes)
            return dataclasses.replace(
                record, chunk_digests=record.chunk_digests[:n], chunk_bytes=record.chunk_bytes or 1, tensors=fitting
            )
        case _:
            return record


@st.composite
def sound_records(draw: st.DrawFn, kind: type) -> Any:
    hints = typing.get_type_hints(kind)
    return sound(draw(st.builds(kind, **{name: values_of(of) for name, of in hints.items()})), draw)


SPECIAL[r.Prompt] = prompts()
SPECIAL[r.Snapshot] = sound_records(r.Snapshot)
SPECIAL[r.CompletedTrajectory] = sound_records(r.CompletedTrajectory)


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_comes_back_as_it_was(name: str) -> None:
    @settings(max_examples=20, deadline=None)
    @given(record=SPECIAL.get(RECORDS[name], sound_records(RECORDS[name])))
    def round_trip(record: r.Record) -> None:
        assert CODEC.decode(CODEC.encode(record)) == record

    round_trip()


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(RECORDS)))
def test_a14_arbitrary_bytes_behind_a_known_fingerprint_decode_or_raise_decode_error(data: bytes, name: str) -> None:
    frame = b"\xc3\x01" + CODEC._schemas.current(name).fingerprint + data
    try:
        record = CODEC.decode(frame)
    except DecodeError:
        return
    assert CODEC.encode(record)
