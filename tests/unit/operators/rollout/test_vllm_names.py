"""What a run file may say of vLLM, with or without vLLM in the environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import ValidationError

from laminar.operators.rollout.config import RolloutConfig, VllmEngineConfig
from laminar.operators.rollout.engines import vllm_names
from laminar.schemas.errors import ConfigError

SOURCE = """
class AsyncThings:
    other: int = 0

class EngineArgs:
    '''Arguments.'''
    model: str = "x"
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    def method(self): ...
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM of three arguments, of which only the source may be looked at."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(vllm_names, "find_spec", lambda name: spec)
    vllm_names.argument_names.cache_clear()
    yield
    vllm_names.argument_names.cache_clear()


@pytest.mark.usefixtures("installed")
def test_arguments_are_checked_against_the_source_of_the_installed_vllm_without_importing_it() -> None:
    assert vllm_names.argument_names() == {"model", "enforce_eager", "gpu_memory_utilization"}
    config = RolloutConfig.model_validate({"engine": {"kind": "vllm", "args": {"enforce_eager": True}}})
    assert isinstance(config.engine, VllmEngineConfig)
    with pytest.raises(ValidationError, match=r"enforce_eagr: vLLM has no such.*\(closest: enforce_eager\)"):
        VllmEngineConfig(args={"enforce_eagr": True})
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", r"is set by model\.path"),
        ("max_num_seqs", r"is set by engine\.max_running"),
        ("logprobs_mode", "is always processed_logprobs"),
        ("data_parallel_size", r"2 \(valid: 1; operators\.rollout\.replicas is the number of engines\)"),
        ("pipeline_parallel_size", r"2 \(valid: 1; tensor_parallel_size is for models"),
        ("nnodes", r"2 \(valid: 1; new weights come through the memory of this machine\)"),
        ("distributed_executor_backend", r"2 \(valid: mp or uni;"),
    ],
)
def test_what_is_said_elsewhere_or_must_be_so_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmEngineConfig(args={name: 2})


def test_the_environment_that_vllm_needs_is_part_of_the_config() -> None:
    env = VllmEngineConfig(env={"VLLM_LOGGING_LEVEL": "INFO", "MINE": "1"}).env
    assert (env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["VLLM_LOGGING_LEVEL"], env["MINE"]) == ("0", "INFO", "1")
    assert VllmEngineConfig.model_validate({"env": dict(env)}).env == env
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"), ("VLLM_CPU_KVCACHE_SPACE", "4")):
        with pytest.raises(ValidationError, match=name):
            VllmEngineConfig(env={name: value})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    from laminar.operators.rollout.engines.vllm import VllmEngine

    with pytest.raises(ConfigError, match=r"engine.kind: vLLM is not installed here: .*laminar-rl\[vllm\].*make vllm"):
        VllmEngine(tmp_path)
