"""What holds for every input: micro-batches, done sets, fates, group assembly, checkpoints of the assembly."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.operators.trainer.batch import Arrival, Assembly, Death, fold, lowest_offsets, take
from laminar.operators.trainer.checkpoint import Saved
from laminar.operators.trainer.config import AlgorithmConfig
from laminar.operators.trainer.done import DoneGroups
from laminar.operators.trainer.packing import micro_batches
from laminar.operators.trainer.progress import Progress
from laminar.operators.trainer.selection import select
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.log import TopicPartition
from tests.support.dataflow import make_prompt
from tests.support.training import eval_prompt, scored

SCORED = TopicPartition("trajectories.scored", 0)
SIZE = 3
CODEC = Codec()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3000), max_size=80), st.integers(1, 8192))
def test_f8_micro_batches_hold_every_row_once_within_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        cost = len(batch) * max(lengths[i] for i in batch)
        assert cost <= budget or len(batch) == 1
    # No micro-batch but the last had room for one more row of its width.
    for batch in batches[:-1]:
        longest = max(lengths[i] for i in batch)
        assert (len(batch) + 1) * longest > budget
    assert batches == micro_batches(lengths, budget)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["a/0", "a/1", "b"]), st.integers(0, 30)), max_size=80))
def test_done_groups_are_a_set_in_little_memory(ids: list[tuple[str, int]]) -> None:
    done, model = DoneGroups(), set()
    for prefix, index in ids:
        done = done.add(f"{prefix}/{index}")
        model.add(f"{prefix}/{index}")
    assert len(done) == len(model)
    for prefix in ("a/0", "a/1", "b"):
        for index in range(31):
            assert (f"{prefix}/{index}" in done) == (f"{prefix}/{index}" in model)
        ranges = done.ranges.get(prefix, ())
        assert all(left[1] < right[0] for left, right in pairwise(ranges))


def test_ids_without_an_index_are_remembered_too() -> None:
    done = DoneGroups().add("odd").add("x/01").add("x/1")
    assert all(i in done for i in ("odd", "x/01", "x/1"))
    assert "x/001" not in done
    assert len(done) == 3


@st.composite
def events(draw: st.DrawFn) -> list[Arrival | Death]:
    """Arrivals (also repeated, also of older attempts), deaths and evaluation answers, in any order."""
    made: list[Arrival | Death] = []
    for offset, (index, member, attempt, kind) in enumerate(
        draw(
            st.lists(
                st.tuples(st.integers(0, 4), st.integers(0, SIZE - 1), st.integers(0, 1), st.sampled_from("ssssde")),
                max_size=50,
            )
        )
    ):
        prompt = make_prompt(index, group_size=SIZE)
        if kind == "d":
            ids = (r.trajectory_id(prompt.prompt_id, member),)
            made.append(Death(group_id=prompt.prompt_id, trajectory_ids=ids, source=SCORED, offset=offset))
            continue
        record = (
            scored(eval_prompt(0, index, 9), 0)
            if kind == "e"
            else scored(prompt, member, draw(st.sampled_from([0.0, 1.0])), attempt=attempt)
        )
        made.append(Arrival(scored=record, source=SCORED, offset=offset, value=CODEC.encode(record)))
    return made


def _run(made: list[Arrival | Death], take_at: int) -> tuple[Assembly, list[str]]:
    state, taken = Assembly(), []
    for event in made:
        state = fold(state, event, group_size=SIZE)
        if len(state.ready) >= take_at:
            groups, state = take(state, take_at)
            taken += [g.group_id for g in groups]
    return state, taken


@settings(max_examples=40)
@given(events(), st.integers(1, 3))
def test_no_group_is_taken_twice_and_taken_groups_are_complete(made: list[Arrival | Death], take_at: int) -> None:
    state, taken = _run(made, take_at)
    assert len(taken) == len(set(taken))
    assert all(g in state.done for g in taken)
    assert not set(taken) & set(state.groups)
    for group_id, group in state.groups.items():
        assert (group_id in state.ready) == (group.complete(SIZE))
    again, more = state, []
    for event in made:  # the same records delivered once more
        again = fold(again, event, group_size=SIZE)
    groups, again = take(again, 100)
    more = [g.group_id for g in groups]
    assert not set(more) & set(taken)


@settings(max_examples=40)
@given(events(), st.integers(1, 3))
def test_a_checkpoint_gives_the_assembly_back(made: list[Arrival | Death], take_at: int) -> None:
    state, _ = _run(made, take_at)
    progress = Progress(step=3, version=5, epoch=1, positions={SCORED: len(made)}, assembly=state)
    packed = progress.pack()
    read = Saved(json.loads(json.dumps(packed.state)), packed.records)
    found = Progress.unpack(read, CODEC, "here")
    assert found.assembly.ready == state.ready
    assert found.assembly.done == state.done
    assert found.assembly.rounds == state.rounds
    assert set(found.assembly.groups) == set(state.groups)
    assert lowest_offsets(found.assembly, found.positions) == lowest_offsets(state, progress.positions)
    for group_id, group in state.groups.items():
        assert found.assembly.groups[group_id].scored == group.scored
        assert set(found.assembly.groups[group_id].members) == set(group.members)


@settings(max_examples=40)
@given(events(), st.integers(0, 3), st.integers(1, SIZE), st.sampled_from(["keep", "drop"]))
def test_every_scored_member_has_exactly_one_fate(
    made: list[Arrival | Death], staleness: int, min_group: int, zero: str
) -> None:
    state, _ = _run(made, 100)
    groups, _ = take(state, 100)
    config = AlgorithmConfig.model_validate({"min_group": min_group, "zero_advantage": zero})
    batch = select(groups, version=2, max_staleness=staleness, config=config)
    fates = [s.trajectory.trajectory_id for s in batch.samples] + [d.trajectory_id for d in batch.dropped]
    members = [a.scored.trajectory.trajectory_id for g in groups for a in g.scored]
    assert sorted(fates) == sorted(members)
    assert sum(batch.staleness.values()) == len(batch.samples)
    assert abs(sum(s.advantage for s in batch.samples)) < 1e-6
