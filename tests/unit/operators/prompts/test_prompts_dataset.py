"""Datasets: every bad row is an error that names file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.operators.prompts.config import DataConfig
from laminar.operators.prompts.dataset import Dataset
from laminar.schemas.errors import ConfigError


def write(path: Path, *lines: str) -> DataConfig:
    path.write_text("\n".join(lines) + "\n")
    return DataConfig(path=path)


def test_text_and_messages_rows_are_read(tmp_path: Path) -> None:
    data = Dataset.read(
        write(
            tmp_path / "d.jsonl",
            json.dumps({"prompt": "ba>", "answer": "ab"}),
            "",
            json.dumps({"messages": [{"role": "user", "content": "1+1"}], "answer": 2, "task": "add"}),
        )
    )
    first, second = data.rows
    assert (first.text, first.messages, first.reference, first.task) == ("ba>", None, "ab", "default")
    assert second.messages == ({"role": "user", "content": "1+1"},)
    assert (second.reference, second.task) == ("2", "add")
    assert second.where.endswith("d.jsonl:3")


def test_parquet_and_jsonl_of_the_same_rows_have_the_same_fingerprint(tmp_path: Path) -> None:
    rows = [{"prompt": "ba>", "answer": "ab"}, {"prompt": "dc>", "answer": "cd"}]
    jsonl = Dataset.read(write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    parquet = Dataset.read(DataConfig(path=tmp_path / "d.parquet"))
    assert jsonl.fingerprint == parquet.fingerprint
    other = Dataset.read(write(tmp_path / "e.jsonl", json.dumps(rows[0])))
    assert other.fingerprint != jsonl.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "x"}', r"d\.jsonl:2: neither 'prompt'"),
        ('{"prompt": "x"}', r"d\.jsonl:2: no 'answer' in the row \(it has: prompt;"),
        ('{"prompt": 3, "answer": "x"}', r"d\.jsonl:2: 'prompt' must be text, but is int"),
        ('{"messages": ["hi"], "answer": "x"}', r"d\.jsonl:2: 'messages' must be a list"),
        ("{", r"d\.jsonl:2: not a JSON object"),
        ("[1]", r"d\.jsonl:2: not a JSON object, but list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset.read(write(tmp_path / "d.jsonl", '{"prompt": "a", "answer": "b"}', line))


def test_a_missing_file_an_unknown_kind_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Dataset.read(DataConfig(path=tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"unknown kind of file '.csv' \(valid: .jsonl, .parquet\)"):
        Dataset.read(write(tmp_path / "d.csv", "x"))
    with pytest.raises(ConfigError, match="no rows"):
        Dataset.read(write(tmp_path / "e.jsonl", ""))
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        Dataset.read(DataConfig(path=tmp_path / "bad.parquet"))


def test_each_epoch_has_another_order_that_the_seed_fixes(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(i), "answer": "x"}) for i in range(20)]
    data = Dataset.read(write(tmp_path / "d.jsonl", *lines))
    first = data.order(0, seed=1, shuffle=True)
    assert sorted(first) == list(range(20))
    assert first == data.order(0, seed=1, shuffle=True)
    assert first != data.order(1, seed=1, shuffle=True)
    assert data.order(0, seed=1, shuffle=False) == list(range(20))
