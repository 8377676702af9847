"""What a person or a supervisor sees when the registry is not right: one line and a code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.pipeline.cli import main
from laminar.schemas.codec import Codec
from laminar.streams.broker import Broker
from laminar.streams.log import OutRecord
from laminar.streams.open import KafkaLogConfig, open_log
from laminar.streams.topics import outgoing, topic_specs
from tests.integration.streams.registry.conftest import Open
from tests.support import sample
from tests.support.apicurio import Apicurio
from tests.support.gate import gate

RUN_FILE = """\
name: {name}
steps: 2
groups_per_step: 1
group_size: 2
model: {{path: .}}
operators: {{reward: {{}}}}
log:
  kind: kafka
  bootstrap: {bootstrap}
  registry:
    url: {url}
    timeout_s: 1
    client: {{basic.auth.user.info: {{env: REGISTRY_LOGIN}}}}
"""


def run_file(folder: Path, url: str, *, bootstrap: str = "127.0.0.1:1", name: str = "demo") -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN_FILE.format(name=name, bootstrap=bootstrap, url=url))
    return path


@pytest.mark.parametrize(
    ("login", "path", "code", "words"),
    [
        (None, "/not/here", 78, "ConfigError: log.registry.url: {url} does not answer as a schema registry"),
        ("someone:else", "", 78, "ConfigError: log.registry: {url} refuses the login (401): check log.registry.client"),
        (None, "gone", 75, "Unavailable: schema registry {url} has our schemas: not within 1 s"),
    ],
)
def test_an_operator_whose_registry_is_not_right_ends_with_one_line_and_its_code(
    tmp_path: Path, apicurio: Apicurio, login: str | None, path: str, code: int, words: str
) -> None:
    with gate(apicurio.url, login=login) as opened:
        url = "http://127.0.0.1:1" if path == "gone" else f"{opened.url}{path}"
        done = subprocess.run(
            [sys.executable, "-m", "laminar.pipeline.cli", "operator", "reward", str(run_file(tmp_path, url))],
            env={"REGISTRY_LOGIN": "someone:hush", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == code, done.stderr
    errors = [json.loads(line)["message"] for line in done.stderr.splitlines() if '"error"' in line]
    assert len(errors) == 1
    assert errors[0].startswith(words.format(url=url))
    assert "hush" not in done.stderr


@pytest.mark.kafka
def test_a_tool_reads_both_framings_and_waits_no_longer_than_it_may_for_an_unknown_schema(
    tmp_path: Path,
    broker: Broker,
    apicurio: Apicurio,
    open_registry: Open,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REGISTRY_LOGIN", "someone:hush")
    name = f"tool{apicurio.port}"
    log = open_log(KafkaLogConfig(bootstrap=broker.bootstrap), run_id=name)
    log.create_topics(topic_specs({"prompts": 1}))
    codec = Codec(registry=open_registry())
    with log.producer("test").transaction() as tx:
        tx.send(outgoing(Codec(), sample.prompt(0)))
        tx.send(outgoing(codec, sample.prompt(1)))
        tx.send(OutRecord(topic="prompts", key=b"k", value=b"\0\x00\x06\x79\x32"))
    log.close()
    with gate(apicurio.url, login="someone:hush") as opened:
        path = run_file(tmp_path, opened.url, bootstrap=broker.bootstrap, name=name)
        assert main(["read", str(path), "prompts", "log.registry.timeout_s=30"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["type"] for line in lines] == ["Prompt", "Prompt", None]
        assert "schema id 424242: unknown to the schema registry" in lines[2]["error"]
        opened.status = 503
        assert main(["read", str(path), "prompts"]) == 75
        (error,) = capsys.readouterr().err.splitlines()
        assert "has schema id" in error
        assert "it answers 503" in error
