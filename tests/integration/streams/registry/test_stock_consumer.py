"""A whole run with a schema registry, read by a consumer that knows nothing of Laminar."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from laminar.pipeline.cli import main
from laminar.schemas.codec import RECORDS
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.open import KafkaLogConfig, open_codec, open_log
from laminar.streams.reading import read_topic
from laminar.streams.registry import RegistryConfig
from laminar.streams.topics import TOPICS, outgoing
from tests.integration.pipeline.test_whole_run import folder, laminar
from tests.integration.streams.registry import stock_consumer
from tests.support.apicurio import Apicurio
from tests.support.every_record import every_record

__all__ = ["folder"]

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]
RUN = "catalogued"


def plain(value: Any) -> Any:
    """Our record as JSON gives the consumer's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def test_a_stock_avro_consumer_reads_every_topic_of_a_run_as_we_do(
    folder: Path,
    broker: Broker,
    apicurio: Apicurio,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [f"name={RUN}", "steps=2", "operators.rollout.replicas=1", "operators.repack.replicas=0"]
    settings += ["log.kind=kafka", f"log.bootstrap={broker.bootstrap}", f"log.registry.url={apicurio.url}"]
    done = laminar(folder, "run", "run.yaml", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((folder / "runs" / RUN / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 2 * 2 * 4
    assert summary["ledger"]["balanced"]

    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["audit", f"runs/{RUN}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undecodable"] == 0
    assert main(["read", f"runs/{RUN}", "training.steps"]) == 0
    steps = [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()]
    assert steps[-1] == "RunEnded"
    assert main(["topics", f"runs/{RUN}", "--json"]) == 0
    topics = json.loads(capsys.readouterr().out)
    assert sum(row["offsets"] for row in topics if row["topic"] == "trajectories.scored") > 0

    config = KafkaLogConfig(bootstrap=broker.bootstrap, registry=RegistryConfig(url=apicurio.url))
    codec, ours, types = open_codec(config), {}, set()
    with closing(open_log(config, run_id=RUN)) as log:  # type: ignore[type-var]
        with closing(log.producer("test")) as producer, producer.transaction() as tx:
            for record in every_record():
                tx.send(outgoing(codec, record))
        for topic in TOPICS:
            for found in read_topic(log, topic, Deadline.after(60, f"read {topic}")):
                assert found.value is not None
                assert found.value[:1] == b"\0"
                record = codec.decode(found.value)
                types.add(type(record))
                ours[f"{RUN}.{topic}", found.partition, found.offset] = plain(record)
    assert types == set(RECORDS.values())

    names = [f"{RUN}.{topic}" for topic in TOPICS]
    command = [sys.executable, "-I", stock_consumer.__file__, broker.bootstrap, apicurio.url, *names]
    stock = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert stock.returncode == 0, stock.stderr[-4000:]
    lines = [json.loads(line) for line in stock.stdout.splitlines()]
    theirs = {(line["topic"], line["partition"], line["offset"]): line["value"] for line in lines}
    assert {place[0] for place in theirs} == set(names)
    assert theirs == ours
