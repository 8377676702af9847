"""The prompts operator over the memory log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from laminar.operators.prompts.config import DataConfig, PromptsConfig
from laminar.operators.prompts.operator import Prompts
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError, TopicMismatch
from laminar.streams.log import Membership, TopicPartition
from laminar.streams.memory import MemoryLog, NoFaults
from laminar.streams.reading import partitions_of
from laminar.streams.topics import TOPICS
from tests.support.dataflow import World
from tests.support.late_log import LateLog

ROWS = 6


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 96 for c in text]}


def config(folder: Path, *, rows: int = ROWS, held_out: int = 0, **changes: Any) -> PromptsConfig:
    def write(name: str, n: int) -> DataConfig:
        path = folder / name
        path.write_text("".join(json.dumps({"prompt": chr(97 + i) * 3, "answer": "x"}) + "\n" for i in range(n)))
        return DataConfig(path=path)

    return PromptsConfig(
        train=write("train.jsonl", rows), eval=write("eval.jsonl", held_out) if held_out else None, **changes
    )


def operator(world: World, given: PromptsConfig) -> Prompts:
    return Prompts(given, world.context("prompts"), PromptTokenizer(Letters(), 16))


def settle(world: World, prompts: Prompts) -> None:
    for _ in range(20):
        while prompts.step(world.now):
            pass
        world.advance(0.1)


def manifest(world: World, version: int, step: int) -> r.VersionManifest:
    return r.VersionManifest(
        run_id="run",
        epoch=1,
        version=version,
        parent=version - 1,
        step=step,
        state="committed",
        tensors=(),
        total_bytes=0,
        chunk_bytes=1,
        chunk_digests=b"",
        root_digest="",
        relay_id="relay-0",
        relay_url="",
        relay_boot="",
        at_ms=world.now_ms,
    )


def train(world: World, step: int, groups: Iterable[r.Prompt], epoch: int = 1, *, published: bool = True) -> None:
    """The trainer takes a step that consumes these groups."""
    ids = tuple(r.trajectory_id(p.prompt_id, m) for p in groups for m in range(p.group_size))
    world.write(
        r.TrainingStep(
            run_id="run",
            epoch=epoch,
            step=step,
            version=step,
            trained=ids,
            dropped=(),
            staleness={},
            metrics={},
            offsets={},
            n_tokens=1,
            duration_ms=1.0,
            at_ms=world.now_ms,
        ),
        *([manifest(world, step, step)] if published else []),
    )


def admitted(world: World) -> list[r.Prompt]:
    found = [p for p in world.read("prompts", r.Prompt) if p.purpose == "train"]
    return sorted(found, key=lambda p: p.created_ms)


def test_a2_the_data_wraps_with_the_next_epoch(tmp_path: Path) -> None:
    world = World(groups_per_step=3)
    prompts = operator(world, config(tmp_path, max_outstanding_groups=3))
    world.write(manifest(world, 0, 0))
    seen: list[r.Prompt] = []
    for step in range(1, 4):
        settle(world, prompts)
        new = [p for p in admitted(world) if p not in seen]
        assert len(new) == 3
        seen += new
        train(world, step, new)
    assert [p.epoch for p in seen] == [0] * 6 + [1] * 3
    assert len({p.prompt_id for p in seen}) == 9


def test_a2_with_one_epoch_the_end_of_the_data_is_announced_once(tmp_path: Path) -> None:
    world = World(groups_per_step=3)
    prompts = operator(world, config(tmp_path, epochs=1))
    settle(world, prompts)
    assert len(admitted(world)) == ROWS
    assert [e.groups for e in world.read("training.steps", r.DataExhausted)] == [ROWS]
    prompts.close()
    settle(world, operator(world, config(tmp_path, epochs=1)))
    assert len(world.read("training.steps", r.DataExhausted)) == 1


def test_a_restart_goes_on_with_the_next_row_and_repeats_none(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    given = config(tmp_path, max_outstanding_groups=2)
    seen: list[r.Prompt] = []
    for step in range(1, 4):
        prompts = operator(world, given)
        settle(world, prompts)
        new = [p for p in admitted(world) if p not in seen]
        seen += new
        train(world, step, new)
        prompts.close()
    assert len(seen) == len({p.prompt_id for p in seen}) == 6


def test_a_resume_with_another_order_repeats_no_row_of_the_epoch(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    prompts = operator(world, config(tmp_path, max_outstanding_groups=4))
    settle(world, prompts)
    prompts.close()
    train(world, 1, admitted(world))
    settle(world, operator(world, config(tmp_path, max_outstanding_groups=4, shuffle=False)))
    ids = [p.prompt_id for p in admitted(world)]
    assert len(ids) == len(set(ids)) == 8
    assert {p.index for p in admitted(world) if p.epoch == 0} == set(range(ROWS))
    train(world, 2, admitted(world)[2:])
    settle(world, operator(world, config(tmp_path, max_outstanding_groups=4)))
    ids = [p.prompt_id for p in admitted(world)]
    assert len(ids) == len(set(ids)) == 12
    assert {p.index for p in admitted(world) if p.epoch == 1} == set(range(ROWS))


def test_an_admission_that_was_committed_after_all_is_not_repeated(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    context = dataclasses.replace(world.context("prompts"), log=LateLog(world.log))  # type: ignore[arg-type]
    prompts = Prompts(config(tmp_path, max_outstanding_groups=4), context, PromptTokenizer(Letters(), 16))
    settle(world, prompts)
    ids = [p.prompt_id for p in admitted(world)]
    assert len(ids) == len(set(ids)) == 4


def test_a2_a_run_that_ran_out_of_data_goes_on_with_more_epochs(tmp_path: Path) -> None:
    world = World(groups_per_step=3)
    prompts = operator(world, config(tmp_path, epochs=1))
    settle(world, prompts)
    train(world, 1, admitted(world))
    world.write(r.RunEnded(run_id="run", epoch=1, step=1, reason="data exhausted at step 1", at_ms=0))
    settle(world, prompts)
    prompts.close()
    prompts = operator(world, config(tmp_path, epochs=1))
    settle(world, prompts)
    assert [e.groups for e in world.read("training.steps", r.DataExhausted)] == [ROWS]
    world.write(r.TrainerStarted(run_id="run", epoch=2, step=1, version=2, at_ms=0))
    settle(world, prompts)
    assert [e.groups for e in world.read("training.steps", r.DataExhausted)] == [ROWS] * 2, "it is said anew"
    prompts.close()
    settle(world, operator(world, config(tmp_path, epochs=2)))
    assert len(admitted(world)) == 2 * ROWS
    assert [e.groups for e in world.read("training.steps", r.DataExhausted)] == [ROWS] * 2 + [2 * ROWS]


def test_groups_of_steps_that_a_resumed_trainer_takes_back_are_outstanding_again(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    prompts = operator(world, config(tmp_path, max_outstanding_groups=2))
    settle(world, prompts)
    train(world, 1, admitted(world))
    settle(world, prompts)
    assert len(admitted(world)) == 4
    world.write(r.TrainerStarted(run_id="run", epoch=2, step=0, version=2, at_ms=world.now_ms))
    settle(world, prompts)
    train(world, 1, admitted(world)[2:], epoch=2)
    settle(world, prompts)
    assert len(admitted(world)) == 4, "the first two groups are outstanding again, so there is no room"
    train(world, 2, admitted(world)[:2], epoch=2)
    settle(world, prompts)
    assert len(admitted(world)) == 6


def test_a10_after_back_pressure_the_number_in_flight_is_back_at_its_cap_at_once(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    prompts = operator(world, config(tmp_path, max_outstanding_groups=6))
    settle(world, prompts)
    train(world, 1, admitted(world))
    while prompts.step(world.now):
        pass
    world.advance(0.06)
    while prompts.step(world.now):
        pass
    assert len(admitted(world)) == 12


def test_a12_with_no_staleness_allowed_each_step_gets_its_groups_for_the_newest_version(tmp_path: Path) -> None:
    world = World(groups_per_step=2, max_staleness=0)
    prompts = operator(world, config(tmp_path))
    settle(world, prompts)
    assert admitted(world) == [], "no version to sample from yet"
    world.write(manifest(world, 0, 0))
    for step in range(1, 5):
        settle(world, prompts)
        new = admitted(world)[2 * (step - 1) :]
        assert [p.min_version for p in new] == [step - 1] * 2
        train(world, step, new)


def test_a12_between_a_step_and_its_version_nothing_is_admitted_for_the_old_one(tmp_path: Path) -> None:
    world = World(groups_per_step=2, max_staleness=0)
    prompts = operator(world, config(tmp_path))
    world.write(r.TrainerStarted(run_id="run", epoch=1, step=0, version=0, at_ms=0), manifest(world, 0, 0))
    settle(world, prompts)
    assert len(admitted(world)) == 2
    train(world, 1, admitted(world), published=False)
    settle(world, prompts)
    assert len(admitted(world)) == 2
    world.write(manifest(world, 1, 1))
    settle(world, prompts)
    assert [p.min_version for p in admitted(world)[2:]] == [1, 1]
    train(world, 2, admitted(world)[2:])
    world.write(r.TrainerStarted(run_id="run", epoch=2, step=2, version=3, at_ms=0))
    settle(world, prompts)
    assert len(admitted(world)) == 4, "a restarted trainer gives its weights a new version"
    world.write(manifest(world, 3, 2))
    settle(world, prompts)
    assert [p.min_version for p in admitted(world)[4:]] == [3, 3]


def test_a_step_that_is_read_before_the_groups_that_it_trained_on_makes_room_for_others(tmp_path: Path) -> None:
    """As by a process that was stopped after its commit for as long as a step takes."""

    class LatePrompts(NoFaults):
        on = True

        def late(self, who: str, partition: TopicPartition) -> bool:
            return self.on and partition.topic == "prompts"

    world, faults = World(groups_per_step=2, max_staleness=0), LatePrompts()
    world.write(manifest(world, 0, 0))
    assert isinstance(world.log, MemoryLog)
    late = MemoryLog(clock=lambda: world.now, broker=world.log.broker, faults=faults)
    context = dataclasses.replace(world.context("prompts"), log=late)
    prompts = Prompts(config(tmp_path), context, PromptTokenizer(Letters(), 16))
    settle(world, prompts)
    train(world, 1, admitted(world))
    settle(world, prompts)
    assert len(admitted(world)) == 2
    faults.on = False
    settle(world, prompts)
    assert len(admitted(world)) == 4


def take_everything(world: World) -> None:
    """The rollouts take all prompts that are there."""
    reader = world.log.reader()
    ends = {p: reader.bounds(p).end for p in partitions_of(world.log, "prompts")}
    with world.log.producer("rollout").transaction() as tx:
        tx.commit_offsets(Membership("run.rollout"), ends)


def test_the_first_evaluation_is_taken_before_anything_is_trained_on(tmp_path: Path) -> None:
    world = World(groups_per_step=2, steps=2)
    prompts = operator(world, config(tmp_path, held_out=5))
    settle(world, prompts)
    first = world.read("prompts", r.Prompt)
    assert [(p.purpose, p.epoch, p.group_size, p.round_size) for p in first] == [("eval", 0, 1, 5)] * 5
    take_everything(world)
    settle(world, prompts)
    assert len(admitted(world)) == 4


def test_the_last_evaluation_comes_after_the_last_step_for_its_version(tmp_path: Path) -> None:
    world = World(groups_per_step=2, steps=2)
    prompts = operator(world, config(tmp_path, held_out=5))
    settle(world, prompts)
    take_everything(world)
    for step in (1, 2):
        settle(world, prompts)
        train(world, step, admitted(world)[2 * (step - 1) : 2 * step])
    settle(world, prompts)
    evals = [p for p in world.read("prompts", r.Prompt) if p.purpose == "eval"]
    assert [p.min_version for p in evals if p.epoch == 2] == [2] * 5
    assert len({p.prompt_id for p in evals}) == 10


def test_a_dead_group_makes_room_for_another(tmp_path: Path) -> None:
    world = World(groups_per_step=2)
    prompts = operator(world, config(tmp_path, max_outstanding_groups=2))
    settle(world, prompts)
    lost = admitted(world)[0]
    world.write(
        r.DeadLetter(
            operator="rollout",
            kind="InvalidRequest",
            error="too long",
            topic="prompts",
            partition=0,
            offset=0,
            attempt=3,
            key=b"k",
            value=None,
            trajectory_ids=tuple(r.trajectory_id(lost.prompt_id, m) for m in range(lost.group_size)),
            at_ms=world.now_ms,
        )
    )
    settle(world, prompts)
    assert len(admitted(world)) == 3


def test_groups_go_to_the_partition_whose_prompts_are_not_taken(tmp_path: Path) -> None:
    world = World(groups_per_step=8)
    prompts = operator(world, config(tmp_path, rows=20, max_outstanding_groups=16))
    settle(world, prompts)
    bounds = [world.log.reader().bounds(p).end for p in partitions_of(world.log, "prompts")]
    assert bounds == [2] * 8


def test_other_data_in_the_same_run_is_refused(tmp_path: Path) -> None:
    world = World()
    settle(world, operator(world, config(tmp_path)))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "zz", "answer": "x"}) + "\n")
    changed = Prompts(
        PromptsConfig(train=DataConfig(path=tmp_path / "train.jsonl")),
        world.context("prompts"),
        PromptTokenizer(Letters(), 16),
    )
    with pytest.raises(TopicMismatch, match="the data changed, or the log belongs to another run"):
        settle(world, changed)


def test_a_prompt_longer_than_the_model_allows_is_refused_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "a", "answer": "x"}\n{"prompt": "%s", "answer": "x"}\n' % ("b" * 16)
    )
    given = PromptsConfig(train=DataConfig(path=tmp_path / "train.jsonl"))
    with pytest.raises(ConfigError, match=r"train.jsonl:2: the prompt has 16 tokens, the model takes 16"):
        operator(World(), given)
    world = World()
    settle(world, operator(world, given.model_copy(update={"too_long": "dead_letter"})))
    assert len(admitted(world)) > 1


def test_a_prompt_longer_than_the_engines_take_is_refused_though_the_model_would_take_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "%s", "answer": "x"}\n' % ("b" * 12))
    context = World().context("prompts")
    context = dataclasses.replace(context, run=dataclasses.replace(context.run, max_model_len=12))
    given = PromptsConfig(train=DataConfig(path=tmp_path / "train.jsonl"))
    with pytest.raises(ConfigError, match=r"train.jsonl:1: the prompt has 12 tokens, engine.max_model_len is 12 with"):
        Prompts(given, context, PromptTokenizer(Letters(), 16))


def test_a_bound_below_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_outstanding_groups: 1 is less than groups_per_step=2"):
        operator(World(groups_per_step=2), config(tmp_path, max_outstanding_groups=1))


@pytest.mark.parametrize(
    ("setting", "value"), [("replicas", 2), ("max_outstanding_groups", 0), ("max_outstanding_groups", -1)]
)
def test_c3_a_producer_without_a_bound_on_admission_is_refused(tmp_path: Path, setting: str, value: int) -> None:
    with pytest.raises(ValidationError, match=setting):
        config(tmp_path, **{setting: value})


def test_c3_nothing_between_admission_and_training_is_ever_evicted() -> None:
    moved = ("prompts", "trajectories.partial", "trajectories.completed", "trajectories.scored")
    for name in (*moved, "training.steps", "dead.letters"):
        spec = TOPICS[name].spec
        assert (spec.cleanup, spec.retention_ms, spec.retention_bytes) == ("delete", -1, -1)


def test_c3_manifests_of_old_versions_do_not_pile_up_for_days() -> None:
    spec = TOPICS["weights.versions"].spec
    assert (spec.cleanup, spec.compaction_lag_ms) == ("compact", 3_600_000)
