"""What goes through the connection to an engine's process comes out as it went in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.remote.wire import Piece, Report, pack, parse, request_of, submission, unpack
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import EMPTY, Tokens

numbers = st.integers(0, 2**31 - 1)


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    n = draw(st.integers(0, 6))
    if not n:
        return EMPTY
    versions = st.sampled_from([3, 3, 3, 4])
    return Tokens(
        n_tokens=n,
        ids=np.asarray(draw(st.lists(numbers, min_size=n, max_size=n)), dtype="<i4").tobytes(),
        logprobs=draw(st.binary(min_size=4 * n, max_size=4 * n)),
        versions=np.asarray(draw(st.lists(versions, min_size=n, max_size=n)), dtype="<i4").tobytes(),
        mask=bytes(draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=n, max_size=n))),
    )


pieces = st.builds(
    Piece,
    st.integers(0, 2**62),
    tokens(),
    st.sampled_from([None, "stop", "length"]),
    st.none() | st.text(max_size=20),
)
reports = st.builds(
    Report,
    seen=st.integers(0, 2**62),
    running=numbers,
    waiting=numbers,
    kv_used=st.integers(0, 2**62),
    preempted=st.integers(0, 2**62),
    pieces=st.lists(pieces, max_size=5),
    answer=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2),
)


@given(reports)
def test_a_report_survives_the_wire(report: Report) -> None:
    assert unpack(pack(report)) == report


samplings = st.builds(
    Sampling,
    max_tokens=numbers,
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1),
    top_k=numbers,
    min_p=st.floats(0, 1),
    stop_token_ids=st.lists(numbers, max_size=3).map(tuple),
    stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)
requests = st.builds(
    EngineRequest,
    trajectory_id=st.text(),
    prompt_ids=st.lists(numbers, max_size=8).map(tuple),
    sampled=tokens(),
    sampling=samplings,
    seed=st.integers(0, 2**64),
)


@given(numbers, requests)
def test_a_request_survives_the_wire(number: int, request: EngineRequest) -> None:
    head, behind = parse(submission(number, request))
    assert (head["do"], head["number"]) == ("submit", number)
    assert request_of(head, behind) == request
