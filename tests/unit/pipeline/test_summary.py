from __future__ import annotations

import json
from pathlib import Path

from laminar.operators.operator import ModelConfig
from laminar.operators.relay.config import RelayConfig
from laminar.pipeline.auditing import audit_run
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.summary import Summary, closing_report, count_totals, write_summary
from laminar.pipeline.view import RunFold
from laminar.schemas import records as r
from laminar.streams.deadline import Deadline
from tests.support.dataflow import World, make_prompt, make_tokens

KEYS = {
    "accuracy_before", "accuracy_after", "steps", "trajectories", "tokens", "wall_s", "moves", "adoptions", "restarts",
    "max_versions_per_trajectory", "staleness", "ledger", "exit_reason",
}  # fmt: skip


def moved(member: int, reason: r.MoveReason) -> r.TrajectoryMoved:
    return r.TrajectoryMoved(
        trajectory_id=f"d/0/0/{member}", attempt=1, reason=reason, from_rollout="rollout-0", to_rollout="rollout-1",
        to_incarnation=1, n_tokens=2, at_ms=0,
    )  # fmt: skip


def completed(member: int, n_tokens: int) -> r.CompletedTrajectory:
    return r.CompletedTrajectory(
        trajectory_id=f"d/0/0/{member}", group_id="d/0/0", member=member, attempt=0, prompt=make_prompt(0),
        response=make_tokens(n_tokens), text="", finish="stop", rollout_id="rollout-0", engine="scripted", seed=0,
        version_min=0, version_max=0, timings=r.Timings(),
    )  # fmt: skip


def test_the_summary_has_exactly_the_keys_of_its_contract_and_counts_from_the_topics(tmp_path: Path) -> None:
    world = World()
    world.write(
        make_prompt(0),
        moved(0, "repack"),
        moved(1, "dead"),
        moved(2, "handback"),
        completed(0, 3),
        completed(1, 5),
        r.TrainerStarted(run_id="run", epoch=0, step=0, version=0, at_ms=0),
        r.TrainingStep(
            run_id="run", epoch=0, step=1, version=1, trained=("d/0/0/0",), staleness={"2": 1}, metrics={}, offsets={},
            dropped=(r.Dropped(trajectory_id="d/0/0/1", reason="zero_advantage"),), n_tokens=3, duration_ms=1.0,
            at_ms=0,
        ),
    )  # fmt: skip
    deadline = Deadline.after(10.0, "test")
    fold = RunFold("run", steps=1)
    config = RunConfig(
        name="run", steps=1, groups_per_step=1, group_size=4, model=ModelConfig(path=tmp_path),
        operators={"relay": RelayConfig()},
    )  # fmt: skip
    summary = Summary.of(
        fold,
        count_totals(world.log, world.codec, deadline),
        audit_run(world.log, world.codec, config, deadline),
        wall_s=12.0,
        restarts=3,
        exit_reason="all 1 steps are done",
    )
    write_summary(tmp_path / "summary.json", summary)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert set(written) == KEYS
    assert set(written["staleness"]) == {"mean", "p99", "max"}
    assert set(written["ledger"]) == {"trained", "dropped", "dead", "in_flight", "balanced"}
    assert (written["trajectories"], written["tokens"]) == (2, 8)
    assert (written["moves"], written["adoptions"]) == (2, 1)
    assert written["staleness"] == {"mean": 2.0, "p99": 2, "max": 2}
    assert written["ledger"]["trained"] == 1
    assert written["ledger"]["dropped"] == {"zero_advantage": 1}
    assert written["ledger"]["in_flight"] == 2
    report = closing_report(summary, run_dir=Path("runs/run"), config="run.yaml", finished=True)
    for text in (
        "all 1 steps are done",
        "1 trained",
        "1 zero_advantage",
        "2 moved, 1 adopted",
        "laminar audit runs/run",
    ):
        assert text in report
    given = {"config": "run.yaml", "overrides": ["log.kind=kafka", "name=a b", "steps=5"]}
    finished = closing_report(summary, run_dir=Path("runs/run"), finished=True, **given)
    assert "laminar run run.yaml log.kind=kafka 'name=a b' steps=1 " in finished
    stopped = closing_report(summary, run_dir=Path("runs/run"), finished=False, **given)
    assert "laminar run run.yaml log.kind=kafka 'name=a b' steps=5 " in stopped
