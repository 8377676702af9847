"""From a GGUF file of Llama's architecture to an ordinary Hugging Face folder: weights, configuration and tokenizer.

GGUF is llama.cpp's file: weights in blocks of few bits, and the vocabulary as metadata. Every weight is written out in
bfloat16, under transformers' names and in its layout, and the whole set is compared with what transformers makes of the
configuration; whatever is missing, left over or of another shape is an error with its name.

>>> convert(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("examples/smollm2/model"))        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.schemas.errors import ConfigError

__all__ = ["convert", "tokenizer_of", "weights_of"]

_CONTROL = 3
"""llama.cpp's type of tokens that never come out of text."""

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path) -> None:
    """Write ``folder`` (which exists) from ``file``. Raises ConfigError for what is not a Llama in GGUF."""
    import gguf
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: is no readable GGUF file: {' '.join(str(error).split())}") from error
    facts = {name: field.contents() for name, field in reader.fields.items()}
    architecture = facts.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file}: holds a model of architecture {architecture!r} (valid: 'llama')")
    weights = weights_of(reader.tensors, facts, where=str(file))
    config = _config(facts, tied="lm_head.weight" not in weights)
    _compare(weights, config, where=str(file))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config.save_pretrained(folder)
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer_of(facts).save_pretrained(folder)


def weights_of(tensors: Any, facts: Mapping[str, Any], *, where: str) -> dict[str, torch.Tensor]:
    """All tensors by transformers' names, in bfloat16. ``tensors``: a ``GGUFReader``'s."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(facts["llama.attention.head_count"]),
        "attn_k": int(facts.get("llama.attention.head_count_kv", facts["llama.attention.head_count"])),
    }
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        name, part = _name(tensor.name, where)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if part in heads:
            values = _in_halves(values, heads[part])
        found[name] = torch.tensor(values).to(torch.bfloat16)
    return found


def _name(theirs: str, where: str) -> tuple[str, str]:
    """transformers' name, and which part of a layer it is ("" outside of layers)."""
    if theirs in _TENSORS:
        return _TENSORS[theirs], ""
    words = theirs.split(".")
    if len(words) == 4 and words[0] == "blk" and words[2] in _LAYER_TENSORS and words[3] == "weight":
        return f"model.layers.{words[1]}.{_LAYER_TENSORS[words[2]]}.weight", words[2]
    raise ConfigError(f"{where}: tensor {theirs!r} is none of a plain Llama's")


def _in_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head as transformers rotates them: first halves, then second halves. llama.cpp has them in pairs."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(facts: Mapping[str, Any], *, tied: bool) -> Any:
    from transformers import LlamaConfig

    heads = int(facts["llama.attention.head_count"])
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=int(facts["llama.embedding_length"]),
        intermediate_size=int(facts["llama.feed_forward_length"]),
        num_hidden_layers=int(facts["llama.block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=int(facts.get("llama.attention.head_count_kv", heads)),
        max_position_embeddings=int(facts["llama.context_length"]),
        rms_norm_eps=_written(facts["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": _written(facts.get("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings=tied,
        bos_token_id=_id(facts, "bos"),
        eos_token_id=_id(facts, "eos"),
        pad_token_id=_id(facts, "padding"),
        dtype="bfloat16",
    )


def _written(value: float) -> float:
    """A number as somebody wrote it before it became float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _id(facts: Mapping[str, Any], which: str) -> int | None:
    value = facts.get(f"tokenizer.ggml.{which}_token_id")
    return None if value is None else int(value)


def _compare(weights: Mapping[str, torch.Tensor], config: Any, *, where: str) -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{where}: {len(wrong)} tensors are not as its configuration says, first {name}:"
            f" {given.get(name, 'missing')}, not {expected.get(name, 'there')}"
        )


def tokenizer_of(facts: Mapping[str, Any]) -> Any:
    """The fast tokenizer that a file's metadata describe, chat template included. Raises ConfigError.

    Bytes as letters, merged in pairs as the file says. What text is first cut at is named by ``tokenizer.ggml.pre``:
    ``smollm`` cuts out every digit by itself and is otherwise GPT-2's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, cut = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in ("smollm", "gpt-2"):
        raise ConfigError(
            f"tokenizer.ggml: model {kind!r} with pre {cut!r} is not known (valid: gpt2 with smollm, gpt-2)"
        )
    tokens = list(facts["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, letters]) if cut == "smollm" else letters
    core.decoder = decoders.ByteLevel()
    special = [tokens[i] for i, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _id(facts, which) for name, which in named.items()}
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
        clean_up_tokenization_spaces=False,
        model_max_length=int(facts["llama.context_length"]),
    )
    made.chat_template = facts.get("tokenizer.chat_template")
    return made
