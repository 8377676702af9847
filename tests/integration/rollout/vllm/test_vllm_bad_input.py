"""What is wrong with a model folder or a setting, as who starts the rollout sees it: one line, and an exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.weights import TensorView
from laminar.pipeline.exit_code import FATAL, USAGE, WRONG_CONFIG, exit_code_of
from laminar.schemas.errors import WeightsMismatch
from tests.integration.rollout.vllm.conftest import SHAPE, Policy, changed, views
from tests.integration.rollout.vllm.forking import Forks
from tests.integration.rollout.vllm.vllm_crew import Lent, VllmCrew
from tests.support.tiny_run import write_tiny_run

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

RUN = """\
name: bad
run_dir: {folder}/run
steps: 2
groups_per_step: 1
group_size: 4
model: {{path: {folder}/model}}
operators: {{rollout: {{engine: {{kind: vllm, process: shared, max_running: 4, max_model_len: 64, kv_total: 512}}}}}}
log: {{kind: sqlite, path: {folder}/log}}
"""
ENGINE = "operators.rollout.engine"

Change = Callable[[Path], object]


def _described(**changes: Any) -> Change:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _of_shape(**shape: Any) -> Change:
    return lambda model: Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **shape})).save_pretrained(model)


def _without(name: str, **shape: Any) -> Change:
    def change(model: Path) -> None:
        _of_shape(**shape)(model)
        tensors = load_file(model / "model.safetensors")
        del tensors[name]
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return change


def _cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _nothing(model: Path) -> None:
    del model


CASES: dict[str, tuple[Change, list[str], str]] = {
    "an architecture that vLLM has not": (
        _described(architectures=["Perceptron1958"]),
        [],
        r"architecture Perceptron1958 is not supported \(closest of the \d+ that are: ",
    ),
    "a head size without a kernel": (
        _of_shape(num_attention_heads=4),
        [],
        r"Qwen2ForCausalLM, head size 16\): .*valid head sizes: 32, 64",
    ),
    "less cache than a request": (
        _nothing, [f"{ENGINE}.kv_total=40"], r"engine\.kv_total: 40 tokens are 1 blocks of 32.*valid: 64",
    ),
    "more tokens than the model has places": (_nothing, [f"{ENGINE}.max_model_len=4096"], r"4096.*512"),
    "a value that is none": (_nothing, [f"{ENGINE}.args.block_size=many"], r"block_size"),
    "no safetensors": (lambda model: (model / "model.safetensors").unlink(), [], r"model\.path: \S+ has no weights"),
    "a broken safetensors file": (
        lambda model: (model / "model.safetensors").write_bytes(b"not one"), [], r"model\.safetensors",
    ),
    "a safetensors file that was cut": (_cut, [], r"model\.safetensors"),
    "a broken config": (lambda model: (model / "config.json").write_text("{"), [], r"config\.json"),
    "no tokenizer": (lambda model: [f.unlink() for f in model.glob("tok*")], [], r"has no tokenizer"),
}  # fmt: skip


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture
def folder(policy: Policy, tmp_path: Path) -> Path:
    shutil.copytree(policy.path, tmp_path / "model")
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    return tmp_path


def _only_error(said: str) -> str:
    """The one line that says what is wrong, in a log of JSON lines."""
    lines = [line for line in said.splitlines() if not re.match(r"\[W\d+ ", line)]  # torch's own, of C++
    entries = [json.loads(line) for line in lines]
    assert not [entry for entry in entries if "exception" in entry], said
    (error,) = (entry["message"] for entry in entries if entry["level"] == "error")
    assert "\n" not in error
    return str(error)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_at_the_start_is_one_line(forks: Forks, folder: Path, case: str) -> None:
    change, settings, message = CASES[case]
    change(folder / "model")
    said = folder / "said"
    code = forks.laminar("operator", "rollout", str(folder / "run.yaml"), *settings, errors=said)
    error = _only_error(said.read_text())
    assert (code, bool(re.search(message, error))) == (WRONG_CONFIG, True), error
    assert len(error) < 1500, "a line that a person can read"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{ENGINE}.args.enforce_eagr=true"], r"engine\.args.*enforce_eagr: .*\(closest: enforce_eager\)"),
        (["model.path=nowhere/model"], r"model\.path.*no such model folder: nowhere/model"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line_before_vllm_is_imported(
    forks: Forks, folder: Path, settings: list[str], message: str
) -> None:
    said = folder / "said"
    assert forks.laminar("operator", "rollout", str(folder / "run.yaml"), *settings, errors=said) == WRONG_CONFIG
    assert re.search(message, _only_error(said.read_text()))


def test_a_missing_vllm_is_one_line_with_the_command_that_installs_it(forks: Forks, folder: Path) -> None:
    said = folder / "said"
    code = forks.laminar("operator", "rollout", str(folder / "run.yaml"), errors=said, without="vllm")
    error = _only_error(said.read_text())
    assert (code, bool(re.search(r"vLLM is not installed here: .*laminar-rl\[vllm\].*make vllm", error))) == (
        WRONG_CONFIG,
        True,
    ), error


def test_laminar_run_ends_with_the_line_of_an_engine_that_cannot_start(tmp_path: Path) -> None:
    """The engine in a process of its own, under the rollout's, under the supervisor: the line comes through."""
    write_tiny_run(tmp_path)
    _described(architectures=["Perceptron1958"])(tmp_path / "model")
    settings = ["operators.rollout.replicas=1", f"{ENGINE}={{kind: vllm, max_running: 4, max_model_len: 64}}"]
    command = [sys.executable, "-m", "laminar.pipeline.cli", "run", "run.yaml", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == USAGE, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert re.match(r"error: rollout-0 exited with code 78: .*architecture Perceptron1958 is not supported", last), last
    assert "Traceback" not in done.stderr


def _nan(weights: dict[str, TensorView]) -> dict[str, TensorView]:
    name = "model.layers.0.mlp.gate_proj.weight"
    values = np.zeros(weights[name].shape, dtype=np.float32)
    values[3, 5] = np.nan
    return changed(weights, name, values)


def _another(weights: dict[str, TensorView]) -> dict[str, TensorView]:
    del weights
    return views(Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "num_hidden_layers": 3})))


def _missing(weights: dict[str, TensorView]) -> dict[str, TensorView]:
    return {name: view for name, view in weights.items() if "layers.1.self_attn.k_proj.weight" not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_nan, r"version 1: weights\.\S+gate_proj\.weight: not all of its 8192 values are finite"),
        (_another, r"version 1: weights: model\.layers\.2\S+.* more are not in the model"),
        (_missing, r"version 1: weights: model\.layers\.1\.self_attn\.k_proj\.weight missing"),
    ],
)
def test_a_version_that_is_not_the_models_ends_the_rollout_with_a_line_before_a_token_of_it_is_sampled(
    policy: Policy, shared: VllmEngine, tmp_path: Path, change: Any, message: str
) -> None:
    def weights(version: int) -> dict[str, TensorView]:
        return policy.weights(0) if version == 0 else change(policy.weights(1))

    crew = VllmCrew(
        tmp_path, engines={"rollout-0": Lent(shared)}, weights=weights, prompts=["abc", "de", "fgh", "ij"],
        steps=2, groups_per_step=2, group_size=2,
    )  # fmt: skip
    with pytest.raises(WeightsMismatch, match=message) as caught:
        crew.go(crew.ended)
    assert "\n" not in str(caught.value)
    assert exit_code_of(caught.value) == FATAL
    assert shared.version == 0
    assert all((one.response.versions_T == 0).all() for one in crew.trajectories().values())
    assert crew.steps_done() == 1
    assert crew.ledger().balanced
    crew.close()
