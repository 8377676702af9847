"""The run files in ``configs/``: each is valid as it stands, and those for GPUs give no GPU to two processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laminar.operators.reward.functions import BUILT_IN
from laminar.operators.rollout.config import RolloutConfig, VllmEngineConfig
from laminar.operators.trainer.config import TrainerConfig
from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.opening import refuse_incomplete
from laminar.pipeline.placement import placed

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
FOR_GPUS = {"gpus-8", "gpus-many"}


def loaded(name: str) -> RunConfig:
    return load_config(ROOT / "configs" / f"{name}.yaml", [], {}, check_files=False).config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_run_file_is_valid_once_its_model_is_there(file: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    settings = [f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    config = load_config(file, settings, {}).config
    assert config.name == file.stem
    refuse_incomplete(config)
    for operator in config.operators.values():
        if getattr(operator, "kind", "") == "reward":
            assert getattr(operator, "function", "") in BUILT_IN


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_run_file_says_to_type_exists(file: Path) -> None:
    named = set(re.findall(r"configs/[a-z0-9_-]+\.yaml", file.read_text()))
    assert named
    assert all((ROOT / one).is_file() for one in named)


def test_on_eight_gpus_no_process_shares_one() -> None:
    config = loaded("gpus-8")
    given = placed(config, [str(i) for i in range(8)])
    used = [gpu for gpus in given.values() for gpu in gpus]
    assert len(used) == len(set(used)) == 7
    assert {instance: len(gpus) for instance, gpus in given.items() if gpus} == {
        ("trainer", 0): 1,
        ("rollout", 0): 2,
        ("rollout", 1): 2,
        ("rollout", 2): 2,
    }


@pytest.mark.parametrize("name", sorted(FOR_GPUS))
def test_a_response_fits_into_engine_and_micro_batch(name: str) -> None:
    """A row longer than the micro-batch's budget gets one of its own, and its memory is not planned for."""
    operators = loaded(name).operators
    rollout, trainer = operators["rollout"], operators["trainer"]
    assert isinstance(rollout, RolloutConfig)
    assert isinstance(rollout.engine, VllmEngineConfig)
    assert isinstance(trainer, TrainerConfig)
    longest = rollout.engine.max_model_len
    assert longest is not None
    assert longest <= trainer.micro_batch_tokens
    sampling = getattr(operators["prompts"], "sampling", None)
    assert getattr(sampling, "max_tokens", longest) < longest
    assert rollout.engine.args["tensor_parallel_size"] == rollout.gpus == 2
