"""Datasets of prompts: JSONL or Parquet rows of text or chat messages with a reference answer.

Bad rows are errors that name file and line before anything is admitted. The fingerprint is over the rows' contents,
so the same rows always give the same prompt ids wherever the file lies.

>>> data = Dataset.read(DataConfig(path=Path("train.jsonl")))        # doctest: +SKIP
>>> data.fingerprint, len(data.rows)
('5b2c61d09f3a', 4096)
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from laminar.operators.prompts.config import DataConfig
from laminar.schemas.errors import ConfigError

__all__ = ["Dataset", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt."""

    text: str | None
    """Raw text; None when there are messages."""
    messages: tuple[Mapping[str, Any], ...] | None
    reference: str | None
    task: str
    where: str
    """``file:line``, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """All rows of a file, checked."""

    path: Path
    fingerprint: str
    """Of the rows' contents, 12 hex digits."""
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, config: DataConfig) -> Dataset:
        """Read and check a file. Raises ConfigError naming file, line and field."""
        path = config.path
        if not path.is_file():
            raise ConfigError(f"{path}: no such file (a .jsonl or .parquet file of prompts is needed)")
        if path.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"{path}: unknown kind of file '{path.suffix}' (valid: .jsonl, .parquet)")
        raw = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)
        digest = xxhash.xxh3_64()
        rows: list[Row] = []
        for where, values in raw:
            row = _row(where, values, config)
            digest.update(json.dumps([row.text, row.messages, row.reference, row.task], sort_keys=True).encode())
            rows.append(row)
            if config.limit is not None and len(rows) == config.limit:
                break
        if not rows:
            raise ConfigError(f"{path}: no rows (at least one prompt is needed)")
        return cls(path=path, fingerprint=digest.hexdigest()[:12], rows=tuple(rows))

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
        """Row numbers in the order of an epoch."""
        order = list(range(len(self.rows)))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        return order


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: not a JSON object: {error}") from None
            if not isinstance(values, dict):
                raise ConfigError(f"{where}: not a JSON object, but {type(values).__name__}")
            yield where, values


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", values
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a readable Parquet file: {error}") from None


def _row(where: str, values: Mapping[str, Any], config: DataConfig) -> Row:
    text, messages = values.get(config.prompt_field), values.get(config.messages_field)
    if text is None and messages is None:
        raise ConfigError(
            f"{where}: neither '{config.prompt_field}' (text) nor '{config.messages_field}' (chat messages)"
            f" in the row (it has: {', '.join(values) or 'nothing'})"
        )
    if messages is not None:
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
        ):
            raise ConfigError(f"{where}: '{config.messages_field}' must be a list of {{role, content}} objects")
    elif not isinstance(text, str):
        raise ConfigError(f"{where}: '{config.prompt_field}' must be text, but is {type(text).__name__}")
    reference = None
    if config.answer_field is not None:
        if values.get(config.answer_field) is None:
            raise ConfigError(
                f"{where}: no '{config.answer_field}' in the row (it has: {', '.join(values)};"
                " answer_field: null if there are no reference answers)"
            )
        answer = values[config.answer_field]
        reference = answer if isinstance(answer, str) else json.dumps(answer)
    return Row(
        text=None if messages is not None else text,
        messages=tuple(messages) if messages is not None else None,
        reference=reference,
        task=str(values.get(config.task_field) or config.task),
        where=where,
    )
