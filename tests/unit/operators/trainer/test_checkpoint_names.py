"""A policy version comes under the names and with the values that the model's folder would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from laminar.operators.checkpoint_name import checkpoint_tensors
from laminar.operators.operator import ModelConfig
from laminar.operators.rollout.engines.torch_model import CausalModel
from laminar.operators.rollout.engines.torch_weights import load_weights
from laminar.operators.trainer.policy import load_model
from laminar.operators.trainer.publish import named_tensors, tied_names
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas.errors import ConfigError

_BASE: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {**_BASE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_CONFIGS: dict[str, Any] = {
    "qwen2": lambda: transformers.Qwen2Config(**_BASE, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**_BASE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_BASE, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "mixtral": lambda: transformers.MixtralConfig(**_BASE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2 moe": lambda: transformers.Qwen2MoeConfig(**_EXPERTS, shared_expert_intermediate_size=8),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**_EXPERTS, head_dim=8),
}
_TIED = {"qwen2": "lm_head.weight", "gemma3": "lm_head.weight", "gpt2": "lm_head.weight"}


def _model(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


def _published(model: Any) -> dict[str, TensorView]:
    named = named_tensors(model, torch.float32, tied_names(model))
    return {t.name: TensorView(dtype=t.dtype, shape=t.shape, data=t.data) for t in named}


@pytest.mark.parametrize("name", _CONFIGS)
def test_d12_the_published_names_and_values_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    _model(_CONFIGS[name](), 1).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    published = _published(model)
    assert published.keys() == files.keys()
    assert list(tied_names(model)) == ([_TIED[name]] if name in _TIED else [])
    for key, tensor in files.items():
        assert published[key].shape == tuple(tensor.shape)
        assert bytes(published[key].data) == tensor.numpy().tobytes(), key


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "qwen3 moe"])
def test_d12_what_is_published_under_the_folders_names_makes_another_model_the_same(name: str) -> None:
    source, target = (_model(_CONFIGS[name](), seed) for seed in (1, 2))
    published = _published(source)
    load_weights(target, published)
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[key]), key


def test_a_part_of_a_tensor_is_the_models_own_memory() -> None:
    model = _model(_CONFIGS["mixtral"](), 1)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    checkpoint_tensors(model)[name].fill_(7.0)
    assert (checkpoint_tensors(model)[name] == 7.0).all()
    held = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert int((held == 7.0).sum()) == checkpoint_tensors(model)[name].numel()
    model.to(torch.bfloat16)  # parameters move: the next views follow
    assert checkpoint_tensors(model)[name].dtype == torch.bfloat16
    assert (checkpoint_tensors(model)[name] == 7.0).all()


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _drop(*names: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        for name in names:
            del tensors[name]
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return change


_LOADERS: dict[str, Callable[[Path], object]] = {
    "trainer": lambda path: load_model(ModelConfig(path=path)),
    "torch engine": lambda path: CausalModel(
        path, dtype="float32", device=torch.device("cpu"), trust_remote_code=False
    ),
}


def _describe_narrower(path: Path) -> None:
    """vLLM would take the first rows of each tensor without a word."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 16}))


@pytest.mark.parametrize("who", _LOADERS)
@pytest.mark.parametrize(
    ("tied", "change", "message"),
    [
        (False, _drop("lm_head.weight"), r"its safetensors lack lm_head\.weight \(valid"),
        (True, _drop("model.layers.1.self_attn.k_proj.weight"), r"lack model\.layers\.1\.self_attn\.k_proj\.weight \("),
        (True, _cut, r"model\.path: \S+: "),
        (True, _describe_narrower, r"model\.path: \S+: .*mismatch"),
    ],
    ids=["an output layer of its own", "a layer's tensor", "half of the file", "the shape that is described"],
)
def test_d11_a_folder_without_a_tensor_that_is_not_tied_is_refused(
    tmp_path: Path, tied: bool, change: Callable[[Path], None], message: str, who: str
) -> None:
    _model(transformers.Qwen2Config(**_BASE, tie_word_embeddings=tied), 1).save_pretrained(tmp_path)
    symbol_tokenizer(list("abc"), separator="", max_length=64).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        _LOADERS[who](tmp_path)
    assert "\n" not in str(caught.value)
