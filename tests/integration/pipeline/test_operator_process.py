"""One operator as a process of its own: signals, the end of the run, exit codes, /healthz and /metrics."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import outgoing, topic_specs
from tests.integration.pipeline.operator_process import Process
from tests.integration.pipeline.supervised import wait_until

RUN_FILE = """\
name: demo
run_dir: {folder}/run
steps: 2
groups_per_step: 1
group_size: 4
model: {{path: {folder}/model}}
operators: {{repack: {{kind: repack}}}}
log: {{kind: sqlite, path: {folder}/log}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "run.yaml").write_text(RUN_FILE.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def log(folder: Path) -> Iterator[SqliteLog]:
    with closing(SqliteLog(folder / "log", owner="demo")) as log:
        log.create_topics(topic_specs())
        yield log


def write(log: SqliteLog, *records: r.Record) -> None:
    with closing(log.producer("test")) as producer, producer.transaction() as tx:
        for record in records:
            tx.send(outgoing(Codec(), record))


def operator(folder: Path, *arguments: str) -> Process:
    return Process(folder, "laminar.pipeline.cli", "operator", "repack", str(folder / "run.yaml"), *arguments)


def test_sigterm_drains_and_exits_0(folder: Path) -> None:
    process = operator(folder)
    process.wait_ready()
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.entries()[-1]["message"] == "done: SIGTERM"
    assert {entry["instance"] for entry in process.entries()} == {"repack-0"}


def test_a7_the_end_event_drains_and_exits_0(folder: Path, log: SqliteLog) -> None:
    process = operator(folder, "--instance", "1")
    process.wait_ready()
    write(log, r.RunEnded(run_id="demo", epoch=0, step=2, reason="all 2 steps are done", at_ms=0))
    assert process.wait() == 0
    assert process.entries()[-1]["message"] == "done: the run ended at step 2: all 2 steps are done"
    assert {entry["instance"] for entry in process.entries()} == {"repack-1"}


def test_a_supervised_process_ignores_the_end_of_the_run_before(folder: Path, log: SqliteLog) -> None:
    write(log, r.RunEnded(run_id="demo", epoch=0, step=2, reason="before", at_ms=0))
    light = ("laminar.pipeline.process", "repack", "0", str(folder / "run.yaml"), "1", str(os.getpid()))
    process = Process(folder, *light)
    process.wait_ready()
    write(log, r.RunEnded(run_id="demo", epoch=1, step=4, reason="now", at_ms=0))
    assert process.wait() == 0
    assert process.entries()[-1]["message"] == "done: the run ended at step 4: now"


def test_a_supervised_process_does_not_outlive_its_supervisor(folder: Path, log: SqliteLog) -> None:
    command = [sys.executable, "-m", "laminar.pipeline.process", "repack", "0", str(folder / "run.yaml"), "0"]
    parent = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen({command!r} + [str(os.getpid())], stderr=open({str(folder / 'child')!r}, 'w'))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    try:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        wait_until(lambda: "is ready" in (folder / "child").read_text(), "ready", 60.0)
    finally:
        supervisor.kill()
        supervisor.communicate()
    wait_until(lambda: gone(child), "the child is gone")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["operators.repack.period_s=-1"], 78, "should be greater than 0"),
        (["log.path=/dev/null/x"], 78, "/dev/null"),
        (["log.partitions.prompts=3"], 70, "prompts"),
        (["log.kind=kafka", "log.bootstrap=127.0.0.1:1", "log.request_timeout_s=1"], 75, "127.0.0.1:1"),
    ],
)
def test_exit_codes_and_one_line_for_each_error(
    folder: Path, log: SqliteLog, arguments: list[str], code: int, words: str
) -> None:
    process = operator(folder, *arguments)
    assert process.wait() == code
    errors = [entry for entry in process.entries() if entry["level"] == "error"]
    assert len(errors) == 1
    assert words in errors[0]["message"]


def test_an_operator_that_is_not_in_the_file_is_named_with_those_that_are(folder: Path) -> None:
    process = Process(folder, "laminar.pipeline.cli", "operator", "trainer", str(folder / "run.yaml"))
    assert process.wait() == 78
    assert "no operator 'trainer'" in process.messages()
    assert "valid: repack" in process.messages()


def test_a_port_that_is_taken_is_a_wrong_configuration(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = operator(folder, "--port", str(port))
        assert process.wait() == 78
    assert f"cannot listen on 127.0.0.1:{port}" in process.messages()


def test_a_relay_or_repack_process_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from laminar.operators import registry; "
        "[__import__(f'{registry.KINDS[k]}.operator') for k in ('relay', 'repack', 'reward')]; "
        "import laminar.pipeline.process; "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'confluent_kafka', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
