"""Rollout: tokens are settled once, envelopes are committed once and in order, every mix of groups is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.operators.rollout.ledger import Ledger, Owned, member_seed
from laminar.operators.rollout.outbox import Outbox
from laminar.operators.rollout.round import Holding, admits, may_sample, takes_groups, version_to_load
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, RecordTooLarge
from laminar.schemas.tokens import EMPTY, Tokens
from laminar.streams.log import OutRecord
from tests.support.dataflow import make_prompt, make_tokens

OPERATIONS = st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["settle", "drop", "join"])), max_size=30)


@given(OPERATIONS)
def test_each_token_is_fresh_until_it_is_settled_or_dropped(operations: list[int | str]) -> None:
    [owned] = Owned.started(make_prompt(group_size=1), at_ms=0)
    settled, fresh = [], []
    for count, operation in enumerate(operations):
        if operation == "settle":
            settled, fresh = settled + fresh, []
            owned.settle()
        elif operation == "drop":
            fresh = []
            owned.drop_fresh()
        elif operation == "join":
            owned.response()
            owned.fresh()
        else:
            new = make_tokens(int(operation), version=count, first=10 * count)
            fresh += new.ids_T.tolist()
            owned.add(new)
        assert owned.fresh().ids_T.tolist() == fresh
        assert owned.response().ids_T.tolist() == settled + fresh
        assert (owned.n_settled, owned.n_fresh, owned.n_tokens) == (len(settled), len(fresh), 4 + len(settled + fresh))
        response = owned.response()
        assert owned.version == (int(response.versions_T[-1]) if response.n_tokens else -1)


@given(st.integers(0, 2**62), st.integers(0, 1000))
def test_member_seeds_fit_every_generator_and_differ(seed: int, member: int) -> None:
    assert 0 <= member_seed(seed, member) < 2**62
    assert member_seed(seed, member) != member_seed(seed, member + 1)


class FlakyProducer:
    """Aborts as it is told; refuses records above a size."""

    def __init__(self, aborts: list[bool], largest: int) -> None:
        self.aborts = aborts
        self.largest = largest
        self.written: list[bytes] = []

    @contextmanager
    def transaction(self, timeout_s: float | None = None, *, visible: bool = True) -> Iterator[FlakyProducer]:
        self.pending: list[bytes] = []
        yield self
        if self.aborts and self.aborts.pop(0):
            raise Aborted("drawn")
        self.written += self.pending

    def send(self, record: OutRecord) -> None:
        assert record.value is not None
        if len(record.value) > self.largest:
            raise RecordTooLarge("too large")
        self.pending.append(record.value)

    def commit_offsets(self, *args: object) -> None: ...
    def close(self) -> None: ...


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), max_size=12),
    st.lists(st.booleans(), max_size=12),
    st.integers(1, 80),
)
def test_envelopes_are_written_once_and_in_order_whatever_aborts(
    envelopes: list[list[int]], aborts: list[bool], max_bytes: int
) -> None:
    outbox, producer = Outbox(max_bytes), FlakyProducer(list(aborts), largest=30)
    [owned] = Owned.started(make_prompt(group_size=1), at_ms=0)
    expected, refused = [], 0
    for number, sizes in enumerate(envelopes):
        values = [bytes([number]) * size for size in sizes]
        outbox.put(owned, [OutRecord(topic="t", key=b"k", value=value) for value in values], 0.0)
        if max(sizes) <= 30:
            expected += values
    for _ in range(len(aborts) + 1):
        with suppress(Aborted):
            outbox.flush(producer, [])  # type: ignore[arg-type]
        refused += len(outbox.take_refused())
    assert (len(outbox), outbox.n_bytes) == (0, 0)
    assert producer.written == expected
    assert refused == sum(max(sizes) > 30 for sizes in envelopes)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.integers(1, 128), st.randoms())
@settings(max_examples=200)
def test_a13_every_sequence_of_groups_is_taken_in_the_end(sizes: list[int], cap: int, rng: object) -> None:
    waiting, in_flight, largest = list(sizes), 0, 0
    for _ in range(len(sizes) * 200):
        while waiting and admits(waiting[0], in_flight=in_flight, max_in_flight=cap):
            in_flight += waiting.pop(0)
            largest = max(largest, in_flight)
        if not waiting:
            break
        assert in_flight > 0, "nothing in hand, and yet a group has to wait"
        in_flight -= rng.randint(1, in_flight)  # type: ignore[attr-defined]
    assert not waiting
    assert largest <= max(cap, *sizes)


@given(st.integers(-1, 5), st.integers(-1, 5), st.integers(0, 3), st.sets(st.integers(0, 5), max_size=3))
def test_a_version_is_loaded_only_with_nothing_in_the_engine_and_loading_comes_to_rest(
    version: int, newest: int, sampling: int, parked: set[int]
) -> None:
    holding = Holding(version=version, newest=newest, sampling=sampling, parked=tuple(sorted(parked - {version})))
    wanted = version_to_load(holding)
    assert not (sampling and wanted is not None)
    assert wanted != version
    if takes_groups(holding, top_up_lag=1):
        assert version >= newest
        assert not holding.parked
    left = set(parked)
    for _ in range(10):  # load, let what waited for it run to its end, load again
        wanted = version_to_load(Holding(version=version, newest=newest, sampling=0, parked=tuple(sorted(left))))
        version = version if wanted is None else wanted
        left -= {version}
    assert not left
    assert version == newest or newest == -1


_VERSION = st.integers(-1, 5)


@given(_VERSION, _VERSION, st.integers(0, 3), st.integers(0, 3), st.integers(1, 4))
def test_in_flight_only_answers_of_an_evaluation_keep_a_newer_version_out(
    version: int, newest: int, sampling: int, answering: int, lag: int
) -> None:
    holding = Holding(
        version=version, newest=newest, sampling=sampling, answering=min(sampling, answering), updates="in_flight"
    )
    wanted = version_to_load(holding)
    assert wanted == (newest if newest > version and not holding.answering else None)
    assert takes_groups(holding, top_up_lag=lag) == (version >= 0 and newest - version < lag)


@given(st.sampled_from(["pinned", "in_flight"]), st.lists(_VERSION, max_size=8), _VERSION, st.integers(0, 5))
def test_versions_of_a_trajectory_never_decrease_and_pinned_there_is_one(
    updates: r.UpdateMode, held: list[int], newest_token: int, min_version: int
) -> None:
    """Whatever versions its rollouts hold one after the other."""
    sampled = [] if newest_token < 0 else [max(newest_token, min_version)]
    for version in held:
        before = sampled[-1] if sampled else -1
        if may_sample(updates, held=version, newest_token=before, min_version=min_version):
            sampled.append(version)
    assert sampled == sorted(sampled)
    assert all(version >= min_version for version in sampled)
    assert updates == "in_flight" or len(set(sampled)) <= 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=20))
def test_an_attempt_is_void_once_it_or_a_newer_one_was_seen(commands: list[tuple[str, int]]) -> None:
    ledger, newest = Ledger(), dict.fromkeys("abc", -1)
    for name, attempt in commands:
        assert ledger.is_void(name, attempt) == (attempt <= newest[name])
        if ledger.is_void(name, attempt):
            continue
        [owned] = Owned.started(make_prompt(group_size=1), at_ms=0)
        owned.trajectory_id, owned.attempt = name, attempt
        ledger.add(owned)
        newest[name] = attempt
        if attempt % 2:
            ledger.remove(owned, attempt + 1)
            newest[name] = attempt + 1


def test_an_empty_response_is_the_empty_buffer() -> None:
    [owned] = Owned.started(make_prompt(group_size=1), at_ms=0)
    assert owned.response() == EMPTY == Tokens.concat([])
