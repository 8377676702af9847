"""``laminar audit --follow``: a run that goes on, one that is over, one that does not balance, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.pipeline.auditing import follow_run
from laminar.pipeline.cli import main
from laminar.pipeline.config.loading import load_config
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.log import OutRecord
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support import sample
from tests.support.synthetic import synthetic_run

CODEC = Codec()
RUN_FILE = """\
name: run
steps: 4
groups_per_step: 2
group_size: 4
model: {path: model}
operators:
  rollout: {engine: {kind: scripted}}
  reward: {}
  trainer: {}
log: {kind: sqlite, path: log}
"""
END = r.RunEnded(run_id="run", epoch=0, step=3, reason="all 3 steps are done", at_ms=1)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteLog]:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN_FILE)
    with closing(SqliteLog("log", owner="run")) as log:
        log.create_topics(topic_specs())
        yield log


def commit(log: SqliteLog, records: list[OutRecord]) -> None:
    with closing(log.producer("test")) as producer, producer.transaction() as tx:
        for record in records:
            tx.send(record)


def transactions() -> Iterator[list[OutRecord]]:
    yield from synthetic_run(CODEC, steps=5, groups_per_step=2, group_size=4, n_tokens=8)
    yield [outgoing(CODEC, END)]


def written(log: SqliteLog) -> None:
    for records in transactions():
        commit(log, records)


def test_a_run_is_followed_until_its_end_event_and_each_violation_is_told_once(log: SqliteLog) -> None:
    rest = [*transactions()]
    twice = sample.training_step(3, epoch=0, trained=["data/0/0/0"])
    rest.insert(-1, [outgoing(CODEC, twice)])  # a third step that was recorded already

    def wait(_: float) -> None:
        for records in rest[:3]:
            commit(log, records)
        del rest[:3]

    config = load_config(Path("run.yaml"), (), check_files=False).config
    looks = [*follow_run(log, CODEC, config, period_s=1.0, timeout_s=60.0, wait=wait)]
    assert [look.final for look in looks] == [False] * (len(looks) - 1) + [True]
    assert len(looks) > 4
    admitted = [look.ledger.admitted for look in looks]
    assert admitted == sorted(admitted)
    assert (admitted[0], admitted[-1]) == (0, 40)
    assert [v.kind for look in looks for v in look.new] == ["step_twice"]
    assert looks[-1].ledger.trained == 24


def test_a_run_that_is_over_is_told_at_once(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    written(log)
    assert main(["audit", "run.yaml", "--follow", "--period", "300"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "step 3  admitted 40  trained 24" in out[0]
    assert out[-1] == "balanced"


def test_json_lines_end_with_the_ledger_that_the_audit_gives_afterwards(
    log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    written(log)
    commit(log, [outgoing(CODEC, sample.scored(sample.completed(sample.prompt(99))))])
    assert main(["audit", "run.yaml", "--follow", "--json"]) == 1
    *_, before, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (before["final"], last["final"]) == (False, True)
    assert {v["kind"] for v in before["new_violations"]} == {"not_admitted", "no_completed"}
    assert last["new_violations"] == []
    assert main(["audit", "run.yaml", "--json"]) == 1
    ledger = json.loads(capsys.readouterr().out)
    assert {name: last[name] for name in ledger} == ledger
    (one, _) = ledger["violation_records"]
    assert one["id"] == "data/0/99/0"
    assert one["places"][0].startswith("trajectories.scored[")


def test_ctrl_c_prints_the_ledger_so_far(log: SqliteLog) -> None:
    for records in [*transactions()][:-1]:
        commit(log, records)
    command = [sys.executable, "-m", "laminar.pipeline.cli", "audit", "run.yaml", "--follow", "--period", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "trained 24" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "the ledger so far" in err
    assert out.splitlines()[-1] == "balanced"


def test_what_was_skipped_and_what_cannot_be_known_is_printed(
    log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = r.OffsetsSkipped(
        operator="reward",
        group="run.reward",
        topic="trajectories.completed",
        partition=2,
        from_offset=5,
        to_offset=9,
        at_ms=1,
    )
    commit(log, [outgoing(CODEC, skipped)])
    assert main(["audit", "run.yaml"]) == 0
    assert "skipped by configuration: trajectories.completed[2] 5..8 by run.reward" in capsys.readouterr().out
