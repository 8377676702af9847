"""A small Qwen2 folder, its weights as policy versions, and vLLM engines over it that live as long as the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 4 + len(LETTERS)
BLOCK = 32
ARGS: dict[str, Any] = {"enforce_eager": True, "block_size": BLOCK, "kv_cache_memory_bytes": 64 << 20}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM these tests are passed over."""
    if find_spec("vllm") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed (`make test-vllm` makes a place for it)")
                )


@dataclass
class Policy:
    """A model folder and any number of policy versions of it."""

    path: Path
    tied: bool = True
    n_kv_heads: int = 1
    _models: dict[int, Any] = field(default_factory=dict)

    def model(self, version: int) -> Any:
        """The version as the trainer has it: another seed each, so that no two agree about anything."""
        if version not in self._models:
            torch.manual_seed(1000 + version)
            shape = {**SHAPE, "num_key_value_heads": self.n_kv_heads, "tie_word_embeddings": self.tied}
            self._models[version] = Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
        return self._models[version]

    def weights(self, version: int) -> dict[str, TensorView]:
        """What the trainer publishes."""
        return views(self.model(version), tied=self.tied)

    def save(self) -> None:
        """Write the folder, with version 0 in it."""
        symbol_tokenizer(list(LETTERS), separator="", max_length=512).save_pretrained(self.path)
        self.model(0).save_pretrained(self.path)


def views(model: Any, *, tied: bool = True) -> dict[str, TensorView]:
    """The state dict, tied names aside, over its memory."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return {
        name: TensorView(
            dtype="F32",
            shape=tuple(tensor.shape),
            data=memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in state.items()
    }


def changed(weights: Mapping[str, TensorView], name: str, values: np.ndarray) -> dict[str, TensorView]:
    """The same weights with other values in one tensor."""
    data = memoryview(np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8))
    return {**weights, name: TensorView(dtype="F32", shape=values.shape, data=data)}


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    made = Policy(tmp_path_factory.mktemp("policy"))
    made.save()
    return made


@pytest.fixture(scope="session")
def start(policy: Policy) -> Iterator[Callable[..., VllmEngine]]:
    """Makes engines, closes them at the end."""
    from laminar.operators.rollout.engines.vllm import VllmEngine

    made: list[VllmEngine] = []

    def make(kind: type[VllmEngine] = VllmEngine, *, path: Path | None = None, **how: Any) -> VllmEngine:
        settings: dict[str, Any] = {
            "max_running": 8, "max_model_len": 256, "kv_total": 4096, "steps_per_poll": 2, "eos_token_ids": (),
            "args": ARGS, **how,
        }  # fmt: skip
        made.append(kind(path or policy.path, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def shared(start: Callable[..., VllmEngine]) -> VllmEngine:
    return start()


@pytest.fixture
def engine(shared: VllmEngine, policy: Policy) -> Iterator[VllmEngine]:
    """An engine with version 0 and nothing in hand."""
    shared.load(policy.weights(0), 0)
    yield shared
    for name in list(shared._rows):
        shared.abort(name)
