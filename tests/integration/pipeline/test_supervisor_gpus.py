"""What each process under the supervisor is told about GPUs, asked of real processes."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from laminar.operators.relay.config import RelayConfig
from laminar.pipeline.run_folder import RunFolder
from laminar.pipeline.supervisor import Supervisor
from laminar.schemas.errors import ConfigError
from laminar.streams.open import open_log
from laminar.streams.topics import topic_specs
from tests.integration.pipeline.supervised import Hook, toy_config

SAY = """
import os, pathlib, sys, time
folder, instance, n = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / (instance + ".new")).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
(folder / (instance + ".new")).rename(folder / (instance + ".gpus"))
until = time.monotonic() + 60
while len(list(folder.glob("*.gpus"))) < n and time.monotonic() < until:
    time.sleep(0.02)
sys.exit(78)
"""


def _said(folder: Path, operators: dict[str, RelayConfig]) -> dict[str, str]:
    config = toy_config(folder, []).model_copy(update={"operators": operators})
    n = str(len(config.instances()))
    with RunFolder(config) as run, closing(open_log(config.log, run_id=config.name)) as log:
        log.create_topics(topic_specs())
        run.write_config(config)

        def command(name: str, index: int) -> list[str]:
            return [sys.executable, "-c", SAY, str(folder), f"{name}-{index}", n]

        Supervisor(config, run, log, Hook(), command=command).run()
    return {file.stem: file.read_text() for file in folder.glob("*.gpus")}


def test_every_process_sees_gpus_of_its_own_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,7")
    operators = {"one": RelayConfig(gpus=2), "two": RelayConfig(gpus=1, replicas=2), "three": RelayConfig()}
    assert _said(tmp_path, operators) == {"one-0": "3,4", "two-0": "5", "two-1": "7", "three-0": ""}


def test_where_no_operator_asks_every_process_sees_what_the_supervisor_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert _said(tmp_path, {"one": RelayConfig(), "two": RelayConfig()}) == {"one-0": "3,4", "two-0": "3,4"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for file in tmp_path.glob("*.gpus"):
        file.unlink()
    assert _said(tmp_path, {"one": RelayConfig()}) == {"one-0": "unset"}


def test_too_few_gpus_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"2 GPUs are needed here \(one 1 x 2\) and 1 are there"):
        _said(tmp_path, {"one": RelayConfig(gpus=2)})
    assert list(tmp_path.glob("*.gpus")) == []
