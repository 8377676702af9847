"""The commands that read a log, over the embedded one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.pipeline.cli import main
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.log import OutRecord
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support.dataflow import make_prompt, make_tokens

RUN_FILE = """\
name: demo
steps: 2
groups_per_step: 1
group_size: 4
model: {path: model}
operators:
  rollout: {engine: {kind: scripted}}
  reward: {}
  trainer: {}
log: {kind: sqlite, path: log}
"""


def write(log: SqliteLog, *records: r.Record) -> None:
    codec = Codec()
    with closing(log.producer("test")) as producer, producer.transaction() as tx:
        for record in records:
            tx.send(outgoing(codec, record))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteLog]:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN_FILE)
    with closing(SqliteLog("log", owner="demo")) as log:
        log.create_topics(topic_specs())
        yield log


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_read_prints_decoded_records_and_stops_at_the_end(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, *(make_prompt(i) for i in range(5)))
    assert main(["read", "run.yaml", "prompts"]) == 0
    found = lines(capsys)
    assert sorted(str(line["key"]) for line in found) == [f"d/0/{i}" for i in range(5)]
    assert {line["type"] for line in found} == {"Prompt"}


def test_read_by_key_offset_time_partition_and_limit(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, *(make_prompt(i) for i in range(20)))
    for arguments, expected in (
        (["--key", "d/0/7"], 1),
        (["--limit", "3"], 3),
        (["--offset", "0"], 20),
        (["--since", "1h"], 20),
        (["--since", "9999999999999"], 0),
    ):
        assert main(["read", "run.yaml", "prompts", *arguments]) == 0
        assert len(lines(capsys)) == expected, arguments
    assert main(["read", "run.yaml", "prompts", "--partition", "0", "--offset", "-1"]) == 0
    (last,) = lines(capsys)
    assert last["partition"] == 0


def test_read_shows_token_values_only_when_asked(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, r.TrajectoryTokens(trajectory_id="d/0/0/0", attempt=0, start=0, tokens=make_tokens(3, 7), at_ms=0))
    assert main(["read", "run.yaml", "trajectories.partial"]) == 0
    assert lines(capsys)[0]["record"]["tokens"] == {"n_tokens": 3}  # type: ignore[index]
    assert main(["read", "run.yaml", "trajectories.partial", "--tokens"]) == 0
    tokens = lines(capsys)[0]["record"]["tokens"]  # type: ignore[index]
    assert tokens["ids"] == [5, 6, 7]
    assert tokens["versions"] == [7, 7, 7]


def test_read_shows_what_cannot_be_decoded_and_goes_on(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(log.producer("test")) as producer, producer.transaction() as tx:
        tx.send(OutRecord(topic="training.steps", key=b"demo", value=b"garbage"))
    write(log, r.RunEnded(run_id="demo", epoch=0, step=2, reason="all 2 steps are done", at_ms=0))
    assert main(["read", "run.yaml", "training.steps"]) == 0
    bad, good = lines(capsys)
    assert "not framed" in str(bad["error"])
    assert bad["value"] == b"garbage".hex()
    assert good["type"] == "RunEnded"


def test_read_of_an_unknown_topic_is_one_line(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "run.yaml", "promts"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: promts: no such topic (did you mean 'prompts'?)"


def test_topics_and_lag(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, *(make_prompt(i) for i in range(20)))
    assert main(["topics", "run.yaml", "--json"]) == 0
    topics = {row["topic"]: row for row in json.loads(capsys.readouterr().out)}
    assert topics["prompts"]["offsets"] == 20
    assert topics["weights.versions"]["cleanup"] == "compact"
    assert main(["lag", "run.yaml", "--json"]) == 0
    lag = json.loads(capsys.readouterr().out)
    assert sum(row["lag"] for row in lag if row["group"] == "demo.rollout") == 20
    assert all((row["oldest_s"] is None) == (row["lag"] == 0) for row in lag)
    assert {row["group"] for row in lag} == {"demo.rollout", "demo.reward", "demo.trainer"}
    assert main(["lag", "run.yaml"]) == 0
    assert "demo.rollout" in capsys.readouterr().out


def test_audit_exits_1_only_when_the_ledger_does_not_balance(
    log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    write(log, make_prompt(0))
    assert main(["audit", "run.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "balanced"
    step = r.TrainingStep(
        run_id="demo", epoch=0, step=1, version=1, trained=("d/0/0/0", "nobody/0/0/0"), dropped=(), staleness={},
        metrics={}, offsets={}, n_tokens=1, duration_ms=1.0, at_ms=0,
    )  # fmt: skip
    write(log, r.TrainerStarted(run_id="demo", epoch=0, step=0, version=0, at_ms=0), step)
    assert main(["audit", "run.yaml", "--json"]) == 1
    ledger = json.loads(capsys.readouterr().out)
    assert not ledger["balanced"]
    assert any("nobody/0/0/0" in violation for violation in ledger["violations"])


def test_a_log_that_does_not_exist_is_not_made(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "run.yaml", "log.path=elsewhere"]) == 2
    assert "no log at elsewhere" in capsys.readouterr().err
    assert not Path("elsewhere").exists()


def test_the_log_of_another_run_is_refused(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lag", "run.yaml", "name=other"]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert "demo" in line
    assert "other" in line


def test_a_broker_that_does_not_answer_is_one_line_within_its_deadline(
    log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["log.kind=kafka", "log.bootstrap=127.0.0.1:1", "log.request_timeout_s=1"]
    assert main(["topics", "run.yaml", *arguments]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:1" in line
