"""A whole run on a tiny model that learns nothing: model, prompts, a reward function and the run file ``run.yaml``."""

from __future__ import annotations

import json
from pathlib import Path

from laminar.pipeline.examples.tokenizer import symbol_tokenizer

__all__ = ["write_tiny_run"]

RUN_FILE = """\
name: tiny
steps: 3
groups_per_step: 2
group_size: 4
model: {path: model}
operators:
  prompts:
    train: {path: train.jsonl}
    eval: {path: heldout.jsonl}
    sampling: {max_tokens: 6}
  rollout: {replicas: 2, engine: {kind: torch, max_running: 16}, heartbeat_s: 0.2}
  reward: {function: "scoring:length"}
  repack: {period_s: 0.2}
  relay: {}
  trainer: {optimizer: {lr: 1.0e-4}, algorithm: {zero_advantage: keep}}
"""

SCORING = """\
def length(trajectory):
    return len(trajectory.text) / 10
"""


def write_tiny_run(folder: Path) -> None:
    """Relative paths: the commands are run in the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = symbol_tokenizer(list("abcdefgh>"), separator="", max_length=32)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    rows = [{"prompt": f"{a}{b}>", "answer": a} for a in "abcdefgh" for b in "abcdefgh"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "scoring.py").write_text(SCORING)
    (folder / "run.yaml").write_text(RUN_FILE)
