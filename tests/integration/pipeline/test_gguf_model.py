"""A GGUF file written here from a model of ours becomes a Hugging Face folder with that model in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from laminar.operators.operator import ModelConfig
from laminar.operators.prompts.dataset import Row
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.pipeline.config.checks import model_problems
from laminar.pipeline.examples.gguf_model import convert, tokenizer_of
from laminar.pipeline.examples.odds import Odds
from laminar.schemas.errors import ConfigError

gguf = pytest.importorskip("gguf", reason="gguf is not installed (it is one of the development tools)")

HEADS, KV_HEADS, LAYERS = 4, 2, 2
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+?.,='\u0120\u010a"
MERGES = ["\u0120 i", "\u0120i s", "a t", "W h", "Wh at", "\u0120 \u0120", "u s", "e r", "us er"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def _model() -> LlamaForCausalLM:
    """Every weight can be written in bfloat16."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-4, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def _in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to the rows of q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = _in_pairs(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            found[f"blk.{layer}.{theirs}.weight"] = weight
    return found


def _write(path: Path, tensors: dict[str, np.ndarray], *, kind: str = "F32", architecture: str = "llama") -> Path:
    writer: Any = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    quantized = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if kind != "F32" and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return _model()


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    convert(_write(made.parent / "tiny.gguf", _tensors(model)), made)
    return made


def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def test_the_folder_holds_the_same_model(model: LlamaForCausalLM, folder: Path) -> None:
    assert model_problems(folder) == []
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config.tie_word_embeddings
    assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == (2, 2)
    assert torch.equal(_logits(loaded), _logits(model))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_weights_of_few_bits_are_written_out(model: LlamaForCausalLM, tmp_path: Path, kind: str) -> None:
    (tmp_path / "model").mkdir()
    convert(_write(tmp_path / "tiny.gguf", _tensors(model), kind=kind), tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs, ours = model.state_dict(), loaded.state_dict()
    step = {"Q8_0": 2.0 / 127, "Q4_1": 2.0 / 15}[kind]  # a block of 32 weights, none above 1
    for name, values in theirs.items():
        assert (ours[name] - values).abs().max() < step, name


def test_its_tokenizer_cuts_digits_apart_and_keeps_text(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "What is 117 + 25?\n  1 user"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    sums = ["What", "_is", "_", "1", "1", "7", "_", "+", "_", "2", "5", "?", "n", "__", "1", "_", "user"]
    assert [piece.replace("\u0120", "_").replace("\u010a", "n") for piece in pieces] == sums
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.unk_token == "<|endoftext|>"


def _chats() -> list[list[dict[str, str]]]:
    user = {"role": "user", "content": "What is 7 + 25?"}
    return [
        [user],
        [{"role": "system", "content": "answer"}, user],
        [user, {"role": "assistant", "content": "32"}, {"role": "user", "content": "is it <|im_end|>"}],
    ]


def _odds(folder: Path) -> Path:
    example = Odds()
    tokenizer = example.tokenizer()
    tokenizer.save_pretrained(folder)
    example.model(tokenizer).config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("which", ["smollm2", "odds"])
def test_e1_the_prompts_operator_encodes_a_chat_as_the_folders_own_template_does(
    folder: Path, tmp_path: Path, which: str
) -> None:
    path = folder if which == "smollm2" else _odds(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    encode = PromptTokenizer.load(ModelConfig(path=path))
    for messages in _chats():
        row = Row(text=None, messages=tuple(messages), reference="32", task="sum", where="rows:1")
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        encoded = encode(row)
        assert list(encoded.ids) == list(expected)
        assert encoded.template == "chat"
        assert tokenizer.decode(encoded.ids) == encoded.text or which == "odds"


def _without(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _with(name: str, n: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {**tensors, name: np.zeros(n, np.float32)}


MISSING = "1 tensors are not as its configuration says, first model.layers.1.self_attn.k_proj.weight: missing"


@pytest.mark.parametrize(
    ("change", "architecture", "message"),
    [
        (_without("blk.1.attn_k.weight"), "llama", MISSING),
        (_with("blk.0.attn_q.bias", 64), "llama", "tensor 'blk.0.attn_q.bias' is none of a plain Llama's"),
        (_with("output_norm.weight", 32), "llama", "first model.norm.weight: (32,), not (64,)"),
        (_with("output_norm.weight", 64), "qwen2", "holds a model of architecture 'qwen2' (valid: 'llama')"),
    ],
    ids=["missing", "left over", "shape", "architecture"],
)
def test_a_file_that_is_not_such_a_model_is_refused_in_one_line(
    model: LlamaForCausalLM, tmp_path: Path, change: Any, architecture: str, message: str
) -> None:
    file = _write(tmp_path / "odd.gguf", change(_tensors(model)), architecture=architecture)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as caught:
        convert(file, tmp_path / "out")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_gguf_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("GGU")
    with pytest.raises(ConfigError, match=r"notes.gguf: is no readable GGUF file") as caught:
        convert(tmp_path / "notes.gguf", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_is_cut_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model 'llama' with pre 'default' is not known"):
        tokenizer_of({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})
