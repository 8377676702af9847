"""The examples as a user meets them: folders of rows and a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.pipeline.examples import write
from laminar.pipeline.examples.odds import Odds
from laminar.pipeline.examples.sortl import Sortl
from laminar.pipeline.examples.task import TASKS
from laminar.schemas.errors import ConfigError
from laminar.schemas.records import Sampling


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model knows does not matter here."""
    for task in (Odds, Sortl):
        monkeypatch.setattr(task, "steps", 3)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def _sortl_rows(folder: Path) -> list[dict[str, str]]:
    lines = [line for name in ("train", "heldout") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in lines]


def _odds_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for name in ("train", "heldout") for row in pq.read_table(folder / f"{name}.parquet").to_pylist()]


def test_sortl_rows_are_right_disjoint_and_plain(tmp_path: Path, short_warm_up: None) -> None:
    made = write("sortl", tmp_path / "sortl")
    rows = _sortl_rows(made.directory)
    assert len(rows) == 4096 + 256
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        letters = row["prompt"].removesuffix(">")
        assert 3 <= len(letters) <= 24
        assert row["answer"] == "".join(sorted(letters))


def test_odds_rows_are_chats_that_its_tokenizer_and_model_take(tmp_path: Path, short_warm_up: None) -> None:
    from transformers import AutoTokenizer

    made = write("odds", tmp_path / "odds")
    rows = _odds_rows(made.directory)
    assert len(rows) == 4096 + 256
    tokenizer: Any = AutoTokenizer.from_pretrained(made.model)
    for row in rows:
        asked = [int(word) for word in row["messages"][-1]["content"].split()]
        assert row["answer"] == " ".join(str(x) for x in sorted(asked) if x % 2)
        assert row["answer"]
    config = json.loads((made.model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids
    assert ids.count(tokenizer.bos_token_id) == 1
    engine = TorchEngine(made.model, version=0)
    engine.submit(EngineRequest(trajectory_id="t/0", prompt_ids=tuple(ids), sampling=Sampling(max_tokens=8), seed=0))
    assert sum(delta.tokens.n_tokens for delta in engine.poll(10.0)) > 0
    answer = tokenizer(rows[0]["answer"], add_special_tokens=False).input_ids
    assert engine.decode((*answer, tokenizer.eos_token_id)) == rows[0]["answer"]


def test_the_same_seed_gives_the_same_files_and_another_one_does_not(tmp_path: Path, short_warm_up: None) -> None:
    first, again, other = (
        write("sortl", tmp_path / name, seed=seed).directory for name, seed in (("a", 4), ("b", 4), ("c", 5))
    )
    assert _contents(first) == _contents(again)
    assert (first / "train.jsonl").read_bytes() != (other / "train.jsonl").read_bytes()


def test_a_finished_example_is_left_alone_unless_forced(tmp_path: Path, short_warm_up: None) -> None:
    folder = tmp_path / "sortl"
    assert write("sortl", folder).created
    marked = folder / "train.jsonl"
    marked.write_text("mine\n")
    said: list[str] = []
    assert not write("sortl", folder, say=said.append).created
    assert said == [f"sortl: already in {folder}, left as it is"]
    assert marked.read_text() == "mine\n"
    assert write("sortl", folder, force=True).created
    assert marked.read_text() != "mine\n"


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path, short_warm_up: None) -> None:
    folder = tmp_path / "odds"
    write("odds", folder)
    with pytest.raises(ConfigError, match="already holds example 'odds' with seed 0"):
        write("sortl", folder)
    with pytest.raises(ConfigError, match="already holds example 'odds' with seed 0"):
        write("odds", folder, seed=1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not empty and is no example") as refused:
            write("sortl", tmp_path / "thesis", force=force)
        assert "\n" not in str(refused.value)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="is a file"):
        write("sortl", tmp_path / "thesis" / "chapter.txt")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["odds", "thesis"]


def test_an_unknown_example_is_refused_with_the_names_of_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown 'sort' \(valid: odds, smollm2, sortl\)"):
        write("sort", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_warm_up_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_warm_up: None
) -> None:
    def stop(self: Sortl, tokenizer: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sortl, "model", stop)
    with pytest.raises(KeyboardInterrupt):
        write("sortl", tmp_path / "sortl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_warmed_up_model_solves_about_a_quarter_when_sampled(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path / name)
    assert made.accuracy is not None
    assert 0.2 < made.accuracy < 0.33
