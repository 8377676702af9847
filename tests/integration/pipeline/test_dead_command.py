"""``laminar dead`` over the embedded log, as typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.pipeline.cli import main
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.dead_letter import dead_letter
from laminar.streams.deadline import Deadline
from laminar.streams.log import LogRecord, OutRecord
from laminar.streams.reading import read_topic
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support import sample

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
COMPLETED = "trajectories.completed"
CODEC = Codec()
GOOD = sample.completed(sample.prompt(0, group_size=4), member=1)


def send(log: SqliteLog, *records: OutRecord | r.Record) -> None:
    with closing(log.producer("test")) as producer, producer.transaction() as tx:
        for record in records:
            tx.send(record if isinstance(record, OutRecord) else outgoing(CODEC, record))


def standing(log: SqliteLog) -> list[LogRecord]:
    return list(read_topic(log, COMPLETED, Deadline.after(10, "read")))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteLog]:
    """Three letters: of rubbish, of a good record, of a member that a rollout gave up."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN_FILE)
    with closing(SqliteLog("log", owner="demo")) as log:
        log.create_topics(topic_specs())
        rubbish = OutRecord(
            topic=COMPLETED, key=b"data/0/0", value=b"rubbish \x00", headers=(("h", b"\xff"),), partition=0
        )
        send(log, rubbish, outgoing(CODEC, GOOD, partition=1), sample.started(sample.prompt(0, group_size=4), 2))
        first, second = standing(log)
        given_up = r.DeadLetter(
            operator="rollout", kind="EngineError", error="out of memory\nin the second line",
            topic="trajectories.partial", partition=-1, offset=-1, attempt=3, key=b"data/0/0/2", value=None,
            group_id="data/0/0", trajectory_ids=("data/0/0/2",), at_ms=86_400_000,
        )  # fmt: skip
        send(
            log,
            dead_letter(first, ValueError("not framed"), operator="reward", attempt=1, at_ms=3_600_000),
            dead_letter(second, KeyError("x"), operator="reward", attempt=3, at_ms=7_200_000, record=GOOD),
            given_up,
        )
        yield log


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["dead", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def test_list_shows_a_line_a_letter_and_totals(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = out(capsys, "list", "run.yaml")
    assert header.split() == ["PLACE", "WHEN", "OPERATOR", "KIND", "SOURCE", "TRIES", "STATE", "ERROR"]
    assert lines[0].split() == [
        "0@0", "1970-01-01", "01:00:00", "reward", "ValueError", f"{COMPLETED}[0]@0", "1", "open", "not", "framed"
    ]  # fmt: skip
    assert "data/0/0/2" in lines[2]
    assert lines[2].endswith("out of memory")
    assert lines[-1] == "     3  together: 3 open"
    assert "     1  EngineError in rollout on trajectories.partial" in lines


@pytest.mark.parametrize(
    ("filters", "places"),
    [
        (["--topic", COMPLETED], ["0@0", "0@1"]),
        (["--operator", "rollout"], ["0@2"]),
        (["--kind", "KeyError"], ["0@1"]),
        (["--state", "retried"], []),
        (["--since", "1970-01-01T02:00:00"], ["0@1", "0@2"]),
        (["--until", "1970-01-01T02:00:00"], ["0@0"]),
        (["--id", "data/0/0"], ["0@1", "0@2"]),
        (["--id", "data/0/0/1"], ["0@1"]),
    ],
)
def test_list_as_json_lines_with_filters(
    filters: list[str], places: list[str], log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [json.loads(line) for line in out(capsys, "list", "run.yaml", "--json", *filters)]
    assert [line["place"] for line in found] == places


def test_show_tells_everything_and_writes_the_bytes(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(out(capsys, "show", "run.yaml", "0@0", "--raw", "bytes"))
    assert Path("bytes").read_bytes() == b"rubbish \x00"
    for part in (
        "state      open",
        "error      ValueError: not framed",
        f"source     {COMPLETED}[0]@0",
        r"header     h: b'\xff'",
        "72 75 62 62 69 73 68 20  00",
        "|rubbish .|",
        "does not decode",
    ):
        assert part in text
    text = "\n".join(out(capsys, "show", "run.yaml", "0@1"))
    assert '"trajectory_id": "data/0/0/1"' in text
    assert "members    data/0/0/1: dead by this letter" in text
    text = "\n".join(out(capsys, "show", "run.yaml", "0@2"))
    assert "in the second line" in text
    assert "a retry begins the trajectory anew" in text
    shown = json.loads("\n".join(out(capsys, "show", "run.yaml", "0@0", "--json")))
    assert bytes.fromhex(shown["bytes"]) == b"rubbish \x00"


def test_retry_of_all_then_again(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys, "retry", "run.yaml", "--all")
    assert lines == [
        f"0@0 retried: it stands on {COMPLETED}[0] again",
        f"0@1 retried: it stands on {COMPLETED}[1] again",
        "0@2 retried: data/0/0/2 begins anew, repack gives it to a rollout",
        "3 retried, 0 already were, 0 not",
    ]
    assert [x.value for x in standing(log)].count(CODEC.encode(GOOD)) == 2
    (line,) = out(capsys, "retry", "run.yaml", "0@1")
    assert line.startswith("0@1 was retried at ")
    assert line.endswith(": nothing done")
    assert out(capsys, "retry", "run.yaml", "--all") == ["no open dead letter: nothing done"]
    assert len(standing(log)) == 4
    assert "retried" in out(capsys, "list", "run.yaml", "--state", "retried")[1]
    assert out(capsys, "show", "run.yaml", "0@2")[1].startswith("state      retried at ")
    assert out(capsys, "drop", "run.yaml", "0@1", "--yes", code=1)[0].endswith(": nothing done")


def test_retry_goes_on_behind_one_that_cannot_be_retried(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    send(
        log,
        r.DeadLetter(
            operator="mine", kind="ValueError", error="no", topic="rollouts.commands", partition=0, offset=0,
            attempt=1, key=b"rollout-0", value=b"v", at_ms=0,
        ),
    )  # fmt: skip
    assert main(["dead", "retry", "run.yaml", "0@3", "0@1"]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: 0@3: a letter of rollouts.commands cannot be retried: a command is for one process")
    assert shown.out.splitlines()[-1] == "1 retried, 0 already were, 1 not"


def test_drop_says_which_fates_stay(log: SqliteLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "drop", "run.yaml", "0@1", "0@0", "--yes") == [
        "0@1 dropped; data/0/0/1 stay dead",
        "0@0 dropped; no member is named in it",
        "2 dropped, 0 already were, 0 not",
    ]
    assert out(capsys, "retry", "run.yaml", "0@1", code=1)[0].startswith("0@1 was dropped at ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["lst", "run.yaml"], "lst: no such action (did you mean 'list'?)"),
        (["list", "none.yaml"], "none.yaml: cannot read the configuration: No such file or directory"),
        (["list", "run.yaml", "0@1"], "0@1: `list` takes no places (valid: filters such as --topic; `show 0@1`)"),
        (
            ["show", "run.yaml"],
            "`show` takes one place, as `laminar dead list` shows them: laminar dead show CONFIG 0@17",
        ),
        (["show", "run.yaml", "0@9"], "0@9: no dead letter stands there (letters near it: 0@0, 0@1, 0@2)"),
        (
            ["show", "run.yaml", "nine"],
            "nine: not the place of a dead letter (valid: 0@17, as `laminar dead list` shows it)",
        ),
        (["retry", "run.yaml"], "`retry` takes places (0@17 0@18), or --all with filters, and not both"),
        (
            ["retry", "run.yaml", "0@1", "--all"],
            "`retry` takes places (0@17 0@18), or --all with filters, and not both",
        ),
        (["retry", "run.yaml", "0@1", "--topic", "x"], "0@1: give places or filters, not both"),
        (["retry", "run.yaml", "0@1", "--yes"], "--yes: not for `retry` (valid for: drop)"),
        (["drop", "run.yaml", "0@1"], "drop: there is no terminal to ask on (valid: --yes)"),
        (["list", "run.yaml", "--all"], "--all: not for `list` (valid for: retry, drop)"),
        (["list", "run.yaml", "--raw", "x"], "--raw: not for `list` (valid for: show)"),
        (["list", "run.yaml", "--state", "opn"], "--state opn: no such state (did you mean 'open'?)"),
        (
            ["list", "run.yaml", "--until", "noon"],
            "--until noon: not a time (valid: 15m, 2026-01-31T12:00:00, or epoch milliseconds)",
        ),
    ],
)
def test_wrong_arguments_are_one_line_with_what_would_be_valid(
    arguments: list[str], line: str, log: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dead", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"error: {line}"]
    assert shown.out == ""


def test_a_run_without_dead_letters(capsys: pytest.CaptureFixture[str], log: SqliteLog) -> None:
    assert out(capsys, "list", "run.yaml", "--kind", "Nothing") == ["no dead letters that these filters leave, of 3"]
