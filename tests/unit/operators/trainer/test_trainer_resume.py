"""Checkpoints and resume: what survives a crash of the trainer, and what does not count twice."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.operators.trainer.checkpoint import Checkpoints, Disk, Saved
from laminar.operators.trainer.config import CheckpointConfig
from laminar.schemas import records as r
from laminar.schemas.errors import CheckpointError, Fenced, OffsetOutOfRange, Unavailable
from laminar.streams.log import TopicPartition
from tests.support.dataflow import make_prompt
from tests.support.training import CountingLearner, Publisher, TrainerRun, dead, eval_prompt, group, scored


class Crash(Exception):
    """The process is gone."""


class CrashingDisk(Disk):
    """Dies after a number of operations."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("make", "write", "save", "sync", "rename", "remove"):
            return found

        def counted(*args: Any) -> None:
            if self.left == 0:
                raise Crash
            found(*args)
            self.left -= 1

        return counted


def _learner(n: int) -> CountingLearner:
    learner = CountingLearner()
    learner.learnt = [str(i) for i in range(n)]
    return learner


@pytest.fixture
def run(tmp_path: Path) -> TrainerRun:
    return TrainerRun(tmp_path)


def test_b7_the_step_after_a_checkpoint_is_the_next_one(run: TrainerRun) -> None:
    run.start()
    run.feed(range(6))
    run.start()
    run.feed([6, 7])
    assert [(s.step, s.epoch) for s in run.steps] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert [s.step for s in run.world.read("training.steps", r.TrainerStarted)] == [0, 3]
    assert len(run.learner.learnt) == 4 * 8


def test_a_resumed_trainer_publishes_its_weights_above_every_version_ever_published(run: TrainerRun) -> None:
    run.start()
    run.feed(range(4))
    run.start()
    run.settle()
    assert run.committed == [0, 1, 2, 3]
    assert run.publisher.sealed[3] == run.publisher.sealed[2] == 16
    last = run.world.read("weights.versions", r.VersionManifest)[-1]
    assert (last.epoch, last.parent, last.step) == (1, 2, 2)


def test_b2_after_a_resume_all_are_trained_and_none_twice(run: TrainerRun) -> None:
    run.start()
    run.feed(range(3))
    run.start()
    run.feed(range(3, 8))
    trained = [t for s in run.steps for t in s.trained]
    assert len(trained) == len(set(trained)) == 8 * 4
    assert sorted(run.learner.learnt) == sorted(trained)


def test_b2_data_that_ends_exactly_at_the_boundary_is_not_trained_again(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    run.world.write(r.DataExhausted(run_id="run", groups=2, at_ms=0))
    run.start()
    run.settle()
    assert len(run.steps) == 1
    assert run.ended == ["data exhausted at step 1"]


def test_b5_groups_that_waited_at_the_checkpoint_are_there_after_it(run: TrainerRun) -> None:
    run.start()
    run.world.write(*group(0)[:3])
    run.world.write(scored(eval_prompt(0, 0, 2), 0, 1.0))
    run.world.write(dead("d/0/9/0"))
    run.feed([1, 2])
    run.start()
    run.world.write(group(0)[3], scored(eval_prompt(0, 1, 2), 0, 0.0))
    run.world.write(*[scored(make_prompt(9), m) for m in (1, 2, 3)])
    run.settle()
    assert {r.group_id_of(t) for t in run.steps[1].trained} == {"d/0/0", "d/0/9"}
    assert len(run.steps[1].trained) == 7
    (result,) = run.world.read("training.steps", r.Evaluation)
    assert (result.n, result.reward_mean) == (2, 0.5)


def test_a_step_above_the_checkpoint_is_voided_and_made_again(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, checkpoint=CheckpointConfig(folder=tmp_path / "checkpoints", every=2))
    run.start()
    run.feed(range(6))
    run.start()  # from step 2: step 3 was not saved
    run.settle()
    assert [(s.step, s.epoch, s.version) for s in run.steps] == [(1, 0, 1), (2, 0, 2), (3, 0, 3), (3, 1, 5)]
    assert run.steps[2].trained == run.steps[3].trained
    assert len(run.learner.learnt) == len(set(run.learner.learnt)) == 3 * 8


def test_a_stop_saves_what_was_learnt_since_the_last_checkpoint(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, checkpoint=CheckpointConfig(folder=tmp_path / "checkpoints", every=100))
    trainer = run.start()
    run.feed([0, 1])
    assert trainer.drain(run.world.now)
    trainer.close()
    run.start()
    run.feed([2, 3])
    assert [s.step for s in run.steps] == [1, 2]


def test_a_finished_run_that_is_started_again_ends_again(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, steps=1)
    run.start()
    run.feed([0, 1, 2])
    run.start()
    run.settle()
    assert len(run.steps) == 1
    assert run.ended == ["all 1 steps are done"] * 2


def test_a17_a_checkpoint_needs_no_rollout_and_no_relay(tmp_path: Path) -> None:
    from laminar.schemas.errors import Unavailable

    run = TrainerRun(tmp_path)
    run.publisher.fail = lambda: Unavailable("relay-0: refused")
    run.start()
    run.feed([0, 1])
    saved = Checkpoints(run.folder, keep=2).load(CountingLearner())
    assert saved is not None
    assert saved.state["step"] == 1


def test_b9_crash_between_any_two_parts_of_a_checkpoint_leaves_a_complete_one(tmp_path: Path) -> None:
    def attempt(operations: int) -> bool:
        folder = tmp_path / str(operations)
        whole = Checkpoints(folder, keep=1)
        whole.begin()
        whole.save("00000001.0", Saved({"step": 1}, (b"one",)), _learner(1))
        crashed = True
        try:
            Checkpoints(folder, keep=1, disk=CrashingDisk(operations)).save(
                "00000002.0", Saved({"step": 2}, (b"second",)), _learner(2)
            )
            crashed = False
        except Crash:
            pass
        learner = CountingLearner()
        saved = Checkpoints(folder, keep=1).load(learner)
        assert saved is not None
        assert (saved.state["step"], saved.records) in [(1, (b"one",)), (2, (b"second",))]
        assert len(learner.learnt) == saved.state["step"]
        Checkpoints(folder, keep=1).save("00000003.1", Saved({"step": 3}, ()), _learner(3))
        assert sorted(p.name for p in folder.iterdir()) == ["00000003.1", "latest.json"]
        return crashed

    outcomes = [attempt(n) for n in range(20)]
    assert outcomes.count(True) > 10
    assert outcomes == sorted(outcomes, reverse=True)
    assert not outcomes[-1]


def test_b9_crash_during_the_first_checkpoint_begins_at_step_0(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path)
    run.start(checkpoints=Checkpoints(run.folder, keep=1, disk=CrashingDisk(16)))
    with pytest.raises(Crash):
        run.feed([0, 1])
    assert [p.name for p in run.folder.iterdir() if p.is_dir()]
    run.start()
    run.settle()
    assert [(s.step, s.epoch) for s in run.steps] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("operation", ["make", "write", "sync", "rename"])
def test_a_full_disk_is_tried_again_and_costs_one_step(run: TrainerRun, operation: str) -> None:
    class Full(Disk):
        def __getattribute__(self, name: str) -> Any:
            if name != operation or not run.learner.learnt:
                return super().__getattribute__(name)

            def fails(*args: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            return fails

    run.start(checkpoints=Checkpoints(run.folder, keep=2, disk=Full()))
    with pytest.raises(Unavailable, match=r"00000001\.0: not saved: .*No space left on device"):
        run.feed([0, 1])
    run.start()
    run.settle()
    assert [(s.step, s.epoch) for s in run.steps] == [(1, 0), (1, 1)]
    run.start()
    run.settle()
    assert run.learner.learnt == list(run.steps[-1].trained)


def test_a_disk_that_is_full_at_the_start_is_tried_again(run: TrainerRun) -> None:
    class Full(Disk):
        def write(self, path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    run.start(checkpoints=Checkpoints(run.folder, keep=2, disk=Full()))
    with pytest.raises(Unavailable, match=r"cannot be written: .*No space left on device"):
        run.settle()
    run.start()
    run.feed([0, 1])
    assert [(s.step, s.epoch) for s in run.steps] == [(1, 0)]


def test_b8_checkpoints_without_a_pointer_are_an_error_and_not_step_0(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    (run.folder / "latest.json").unlink()
    run.start()
    with pytest.raises(CheckpointError, match=r"latest\.json: missing, but .* holds checkpoints \(00000001\.0\)"):
        run.settle()


def test_b8_a_lost_folder_is_an_error_and_not_step_0(run: TrainerRun, tmp_path: Path) -> None:
    run.start()
    run.feed([0, 1])
    run.folder.rename(tmp_path / "elsewhere")
    run.start()
    with pytest.raises(CheckpointError, match="run 'run' has trained to step 1"):
        run.settle()


def test_b8_the_pointer_never_names_what_is_not_durable(tmp_path: Path) -> None:
    order: list[str] = []

    class Watching(Disk):
        def sync(self, path: Path) -> None:
            order.append(f"sync {path.name}")
            super().sync(path)

        def rename(self, source: Path, target: Path) -> None:
            order.append(f"rename {target.name}")
            super().rename(source, target)

    checkpoints = Checkpoints(tmp_path / "c", keep=1, disk=Watching())
    checkpoints.save("00000001.0", Saved({"step": 1}, ()), _learner(1))
    assert order == [
        "sync learner.json", "sync records.bin", "sync state.json", "sync .00000001.0.partial",
        "rename 00000001.0", "sync c",
        "sync latest.json.partial", "rename latest.json", "sync c",
    ]  # fmt: skip


def test_only_the_newest_checkpoints_are_kept(run: TrainerRun) -> None:
    run.start()
    run.feed(range(8))
    assert sorted(p.name for p in run.folder.iterdir()) == ["00000003.0", "00000004.0", "latest.json"]
    assert json.loads((run.folder / "latest.json").read_text()) == {"checkpoints": ["00000004.0", "00000003.0"]}


def test_a_checkpoint_of_another_model_is_refused_in_one_line(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    run.start(learner=CountingLearner("other/2"))
    with pytest.raises(CheckpointError) as caught:
        run.settle()
    message = str(caught.value)
    assert "saved from model counting/1" in message
    assert "other/2" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "state.json").write_text("{"), "damaged"),
        (lambda c: (c / "records.bin").unlink(), "damaged"),
        (lambda c: (c / "records.bin").write_bytes(b"xx"), "2 bytes, 0 are needed"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_it(
    run: TrainerRun, damage: Callable[[Path], object], message: str
) -> None:
    run.start()
    run.feed([0, 1])
    damage(run.folder / "00000001.0")
    run.start()
    with pytest.raises(CheckpointError, match=message):
        run.settle()


def test_an_offset_that_retention_passed_is_a_hard_error_with_both_numbers(run: TrainerRun) -> None:
    run.start()
    run.feed([0, 1])
    partition = _busiest(run)
    # A checkpoint from before, and a log whose beginning was cut off.
    run.start()
    name = json.loads((run.folder / "latest.json").read_text())["checkpoints"][0]
    state = run.folder / name / "state.json"
    saved = json.loads(state.read_text())
    saved["positions"] = [[*p[:2], 0] for p in saved["positions"]]
    state.write_text(json.dumps(saved))
    _cut(run, partition, 3)
    with pytest.raises(OffsetOutOfRange, match=r"needs offset 0, but the log begins at 3"):
        run.settle()


def _busiest(run: TrainerRun) -> TopicPartition:
    reader = run.world.log.reader()
    partitions = [TopicPartition("trajectories.scored", p) for p in range(8)]
    ends = {p: reader.bounds(p).end for p in partitions}
    reader.close()
    return max(partitions, key=lambda p: ends[p])


def _cut(run: TrainerRun, partition: TopicPartition, start: int) -> None:
    """What retention does."""
    broker = run.world.log.broker  # type: ignore[attr-defined]
    kept = broker.partitions[partition]
    kept.records = [record for record in kept.records if record.offset >= start]
    kept.start = start


def test_a_crash_after_the_record_and_before_the_checkpoint_trains_nothing_twice(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path)
    run.start(checkpoints=Checkpoints(run.folder, keep=2, disk=CrashingDisk(10_000)))
    run.feed([0, 1])
    disk = CrashingDisk(0)
    assert run.trainer is not None
    run.trainer._checkpoints = Checkpoints(run.folder, keep=2, disk=disk)
    with pytest.raises(Crash):
        run.feed([2, 3])
    run.publisher = Publisher()
    run.start()
    run.feed([4, 5])
    assert [(s.step, s.epoch) for s in run.steps] == [(1, 0), (2, 0), (2, 1), (3, 1)]
    assert len(run.learner.learnt) == len(set(run.learner.learnt)) == 3 * 8


def test_a2_a_run_that_ran_out_of_data_waits_for_more_when_it_is_resumed(run: TrainerRun) -> None:
    run.start()
    run.world.write(r.DataExhausted(run_id="run", groups=2, at_ms=0))
    run.feed([0, 1])
    assert run.ended == ["data exhausted at step 1"]
    run.start()
    run.settle()
    assert len(run.ended) == 1, "whether there is more data is for prompts to say"
    run.world.write(r.DataExhausted(run_id="run", groups=4, at_ms=0))
    run.feed([2, 3])
    assert run.ended[1:] == ["data exhausted at step 2"]


def test_a_trainer_that_slept_does_not_push_its_checkpoint_in_front_of_its_successors(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.begin()
    checkpoints.save("00000003.1", Saved({"step": 3}, ()), _learner(3))
    with pytest.raises(Fenced, match=r"a newer trainer has saved 00000003\.1"):
        checkpoints.save("00000004.0", Saved({"step": 4}, ()), _learner(4))
    assert checkpoints.names() == ["00000003.1"]
    checkpoints.save("00000004.1", Saved({"step": 4}, ()), _learner(4))
    assert checkpoints.names() == ["00000004.1"]
