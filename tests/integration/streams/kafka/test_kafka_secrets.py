"""Processes against a broker that requires TLS and a password: they run, and never write the password anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from laminar.streams.broker import Authority, Broker, Security
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PASSWORD = "wonderland-of-tests"
WRONG = "looking-glass-of-tests"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A user ``alice`` who may do what a run called ``tiny`` needs, and nothing else."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority.make(folder / "authority")
    security = Security(authority=authority, users={"alice": PASSWORD}, permissions=True)
    with Broker(folder / "broker", port=0, security=security) as broker:
        mine = ["CREATE", "DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE"]
        broker.allow("alice", "topic", "tiny.", mine, prefixed=True)  # type: ignore[arg-type]
        broker.allow("alice", "group", "tiny", ["READ"], prefixed=True)
        broker.allow("alice", "transactional_id", "tiny", ["WRITE", "DESCRIBE"], prefixed=True)
        yield broker


@pytest.fixture(scope="module")
def folder(secured: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny_run(made)
    config = yaml.safe_load((made / "run.yaml").read_text())
    client = {**secured.security.client("alice"), "sasl.password": {"env": "KAFKA_PASSWORD"}}
    config["log"] = {"kind": "kafka", "bootstrap": secured.bootstrap, "request_timeout_s": 15, "client": client}
    config["steps"] = 1
    (made / "run.yaml").write_text(yaml.safe_dump(config))
    return made


def laminar(folder: Path, *arguments: str, password: str | None = PASSWORD) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KAFKA_PASSWORD"}
    if password is not None:
        environment["KAFKA_PASSWORD"] = password
    return subprocess.run(
        [sys.executable, "-m", "laminar.pipeline.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def written(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_run_of_a_user_with_only_the_permissions_that_it_needs(folder: Path) -> None:
    done = laminar(folder, "run", "run.yaml", "runner.log_level=debug")
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((folder / "runs" / "tiny" / "summary.json").read_text())
    assert summary["ledger"]["balanced"]
    assert laminar(folder, "audit", "runs/tiny").returncode == 0
    shown = laminar(folder, "config", "runs/tiny")
    assert 'log.client.sasl.password.env = "KAFKA_PASSWORD"' in shown.stdout
    files = written(folder)
    assert len(files) > 10
    assert [name for name, content in files.items() if PASSWORD.encode() in content] == []
    assert PASSWORD not in done.stdout + done.stderr + shown.stdout + shown.stderr


def test_an_operator_with_a_wrong_password_exits_78_with_one_line_and_never_says_it(folder: Path) -> None:
    loud = ["log.client.debug=security,broker,conf", "runner.log_level=debug", "log.request_timeout_s=3"]
    done = laminar(folder, "operator", "reward", "run.yaml", *loud, password=WRONG)
    assert done.returncode == 78, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (error,) = [line["message"] for line in lines if line["level"] == "error"]
    assert "log.client.sasl.username, sasl.password: " in error
    assert "does not accept the user 'alice' with this password (SCRAM-SHA-512)" in error
    assert len(lines) > 5, "librdkafka was told to say much"
    assert WRONG not in done.stdout + done.stderr
    assert [name for name, content in written(folder).items() if WRONG.encode() in content] == []


def test_commands_say_in_one_line_what_the_broker_refuses(folder: Path, secured: Broker) -> None:
    quick = "log.request_timeout_s=3"
    done = laminar(folder, "topics", "run.yaml", quick, password=WRONG)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: log.client.sasl.username, sasl.password: ")
    assert WRONG not in line
    done = laminar(folder, "topics", "run.yaml", password=None)
    assert done.stderr == "error: log.client.sasl.password: the environment variable KAFKA_PASSWORD is not set\n"
    done = laminar(folder, "topics", "run.yaml", "log.client.sasl.password={file: no/such/file}")
    assert done.stderr == "error: log.client.sasl.password: cannot read no/such/file: No such file or directory\n"
    done = laminar(folder, "topics", "run.yaml", quick, "log.bootstrap=127.0.0.1:1")
    assert done.returncode == 75
    (line,) = done.stderr.splitlines()
    assert "nothing listens on 127.0.0.1:1" in line
    done = laminar(folder, "run", "run.yaml", quick, "name=other")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "needs CREATE on topic other." in line


def test_a_password_in_a_file_lets_in(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD + "\n")
    done = laminar(folder, "topics", "run.yaml", f"log.client.sasl.password={{file: {secret}}}", password=None)
    assert done.returncode == 0, done.stderr
    assert "training.steps" in done.stdout
