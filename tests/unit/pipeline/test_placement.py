"""Which process sees which GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.operators.operator import ModelConfig, OperatorConfig
from laminar.operators.relay.config import RelayConfig
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.trainer.config import TrainerConfig
from laminar.pipeline.config.checks import problems
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.placement import environment_of, gpus_here, placed
from laminar.schemas.errors import ConfigError


def run_of(operators: dict[str, OperatorConfig]) -> RunConfig:
    return RunConfig(
        name="demo",
        steps=1,
        groups_per_step=1,
        group_size=1,
        model=ModelConfig(path=Path("model")),
        operators=operators,
    )


def vllm(replicas: int = 1, gpus: int | None = None, **args: Any) -> RolloutConfig:
    return RolloutConfig(replicas=replicas, gpus=gpus, engine={"kind": "vllm", "args": args})


EIGHT = [str(i) for i in range(8)]


def test_no_gpu_is_given_twice_and_who_asks_for_none_sees_none() -> None:
    config = run_of(
        {"relay": RelayConfig(), "rollout": vllm(3, 2, tensor_parallel_size=2), "trainer": TrainerConfig(gpus=1)}
    )
    assert placed(config, EIGHT) == {
        ("relay", 0): (),
        ("rollout", 0): ("0", "1"),
        ("rollout", 1): ("2", "3"),
        ("rollout", 2): ("4", "5"),
        ("trainer", 0): ("6",),
    }
    assert environment_of(("2", "3")) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert environment_of(()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_where_nobody_says_a_number_everybody_sees_what_there_is() -> None:
    assert placed(run_of({"relay": RelayConfig(), "trainer": TrainerConfig()}), EIGHT) == {}
    assert environment_of(None) == {}


def test_too_few_gpus_are_said_with_the_numbers() -> None:
    config = run_of({"rollout": vllm(3, 2), "trainer": TrainerConfig(gpus=1)})
    with pytest.raises(ConfigError) as caught:
        placed(config, EIGHT[:4])
    assert str(caught.value).startswith(
        "operators: 7 GPUs are needed here (rollout 3 x 2, trainer 1 x 1) and 4 are there (lower gpus"
    )


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "5, 7"}, ["5", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1b2c,GPU-8f00"}, ["GPU-1b2c", "GPU-8f00"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_the_gpus_of_a_machine(tmp_path: Path, environ: dict[str, str], names: list[str]) -> None:
    for file in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / file).touch()
    assert gpus_here(environ, tmp_path) == names


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ({"trainer": TrainerConfig(gpus=2)}, "must be at most 1, not 2: the trainer is one process on one device"),
        ({"rollout": vllm(1, 1, tensor_parallel_size=2)}, "must be engine.args.tensor_parallel_size = 2, not 1"),
        ({"rollout": vllm(1, None), "trainer": TrainerConfig(gpus=1)}, "tensor_parallel_size = 1, not None"),
        ({"rollout": vllm(1, 0), "trainer": TrainerConfig(gpus=1)}, None),
        ({"rollout": vllm(2, 4, tensor_parallel_size=4)}, None),
        ({"rollout": vllm(1, None, tensor_parallel_size=2)}, None),
    ],
)
def test_gpus_and_what_an_operator_does_with_them_must_agree(
    operators: dict[str, OperatorConfig], message: str | None
) -> None:
    found = [text for at, text in problems(run_of(operators), check_files=False) if at[-1] == "gpus"]
    assert (found == []) if message is None else (len(found) == 1 and message in found[0]), found
