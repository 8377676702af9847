"""The models and requests of the rollout benchmark: random weights in a model folder, prompts, lengths and seeds.

Nothing ends a response but its own number of tokens: the folders name no end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.ledger import Owned
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas.records import Prompt, Sampling, VersionManifest
from laminar.schemas.tokens import ids_buffer

__all__ = ["BATCH", "GROUP", "LONGEST", "SIZES", "Size", "Workload", "make_folder", "manifest"]

BATCH = 64
GROUP = 8
LONGEST = 512
_N_PROMPT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and how much is asked of it in one round."""

    shape: Mapping[str, int]
    llama: bool = False
    n_groups: int
    n_tokens: int
    """The median of a response."""
    n_rounds: int = 4
    """A machine that others use too is now and then undisturbed for seconds, and never for a minute."""


SIZES: Mapping[str, Size] = {
    "tiny": Size(
        shape={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 32,
        },
        n_groups=144,
        n_tokens=100,
        n_rounds=12,
    ),
    "20M": Size(
        shape={
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "vocab_size": 32,
        },
        n_groups=48,
        n_tokens=50,
    ),
    "135M": Size(
        shape={
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
        },
        llama=True,
        n_groups=12,
        n_tokens=24,
    ),
}
"""The quickstart's model, a larger one of its kind, and SmolLM2-135M's shape."""


class Workload:
    """What both sides are asked, round after round: the same lengths and seeds, new names."""

    def __init__(self, size: Size, *, quick: bool) -> None:
        n = max(BATCH // GROUP + 2, size.n_groups // 2) if quick else size.n_groups
        rng = np.random.default_rng(0)
        drawn = np.exp(rng.normal(np.log(size.n_tokens), 0.5, n)).astype(int)
        self._lengths: list[int] = np.clip(drawn, 8, LONGEST - _N_PROMPT).tolist()
        low = min(4, size.shape["vocab_size"] - 1)
        self._prompts = [rng.integers(low, size.shape["vocab_size"], _N_PROMPT).tolist() for _ in range(n)]
        self.n_responses = n * GROUP
        self.n_tokens = sum(self._lengths) * GROUP

    def groups(self, round_: int) -> Iterator[Prompt]:
        """As the rollout operator finds them on the log."""
        for i, (prompt, length) in enumerate(zip(self._prompts, self._lengths, strict=True)):
            index = round_ * len(self._prompts) + i
            yield Prompt(
                prompt_id=f"bench/0/{index}",
                dataset="bench",
                epoch=0,
                index=index,
                purpose="train",
                task="bench",
                group_size=GROUP,
                prompt_tokens=ids_buffer(prompt),
                n_prompt_tokens=len(prompt),
                prompt_text="",
                sampling=Sampling(max_tokens=length),
                seed=i,
                created_ms=0,
            )

    def requests(self, round_: int) -> Iterator[EngineRequest]:
        """The same, as an engine is asked for them."""
        for group in self.groups(round_):
            for member in Owned.started(group, at_ms=0):
                yield EngineRequest(
                    trajectory_id=member.trajectory_id,
                    prompt_ids=member.prompt_ids,
                    sampling=group.sampling,
                    seed=member.seed,
                )


def make_folder(path: Path, size: Size) -> dict[str, TensorView]:
    """Write a model folder; return its weights as a relay would show them, in a file that can be mapped."""
    shape: dict[str, Any] = {
        **size.shape,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**shape)) if size.llama else Qwen2ForCausalLM(Qwen2Config(**shape))
    model.save_pretrained(path)
    n_symbols = size.shape["vocab_size"] - 4
    tokenizer = symbol_tokenizer([f"w{i}" for i in range(n_symbols)], separator=" ", max_length=LONGEST)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    tensors = {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    file = path / "weights.bin"
    offsets: dict[str, int] = {}
    with file.open("wb") as out:
        for name, values in tensors.items():
            offsets[name] = out.tell()
            out.write(values.tobytes())
            out.write(bytes(-out.tell() % 64))
    return {
        name: TensorView(
            dtype="F32",
            shape=tuple(model.state_dict()[name].shape),
            data=memoryview(values),
            path=str(file),
            offset=offsets[name],
        )
        for name, values in tensors.items()
    }


def manifest() -> VersionManifest:
    """Of the only version."""
    return VersionManifest(
        run_id="bench",
        epoch=0,
        version=0,
        parent=-1,
        step=0,
        state="committed",
        tensors=(),
        total_bytes=0,
        chunk_bytes=4096,
        chunk_digests=b"",
        root_digest="",
        relay_id="relay-0",
        relay_url="",
        relay_boot="boot",
        at_ms=0,
    )
