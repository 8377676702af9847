"""Builders for tests that drive operators over the memory log with a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import Tokens, ids_buffer
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.memory import MemoryLog
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs

T = TypeVar("T")

__all__ = ["World", "make_prompt", "make_tokens"]


def make_prompt(index: int = 0, **changes: Any) -> r.Prompt:
    """A training prompt of four tokens, group size 4, unless changed."""
    values: dict[str, Any] = {
        "prompt_id": f"d/0/{index}",
        "dataset": "d",
        "epoch": 0,
        "index": index,
        "purpose": "train",
        "task": "test",
        "group_size": 4,
        "prompt_tokens": ids_buffer([1, 2, 3, 4]),
        "n_prompt_tokens": 4,
        "prompt_text": "abcd",
        "reference": "x",
        "sampling": r.Sampling(max_tokens=32),
        "seed": index,
        "created_ms": 0,
    }
    return r.Prompt(**{**values, **changes})


def make_tokens(n: int, version: int = 0, first: int = 5) -> Tokens:
    """``n`` tokens with increasing ids."""
    return Tokens.build(ids=list(range(first, first + n)), logprobs=[-0.5] * n, version=version)


@dataclass
class World:
    """One memory log with every topic, and a clock that only ``advance`` moves."""

    groups_per_step: int = 2
    group_size: int = 4
    steps: int = 10
    max_staleness: int | None = None
    now: float = 1_000_000.0
    codec: Codec = field(default_factory=Codec)
    log: Log = field(init=False)

    def __post_init__(self) -> None:
        self.log = MemoryLog(clock=lambda: self.now)
        self.log.create_topics(topic_specs())
        self._producer = self.log.producer("test")

    def context(self, name: str, model: Path = Path("model")) -> Context:
        """What an operator is given."""
        return Context(
            run=RunInfo(
                run_id="run",
                run_dir=Path("runs/test"),
                steps=self.steps,
                groups_per_step=self.groups_per_step,
                group_size=self.group_size,
                max_staleness=self.max_staleness,
                seed=0,
                model=ModelConfig(path=model),
            ),
            name=name,
            instance=f"{name}-0",
            log=self.log,
            codec=self.codec,
            clock=lambda: self.now,
        )

    @property
    def now_ms(self) -> int:
        """The clock in milliseconds."""
        return int(self.now * 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def write(self, *records: r.Record) -> None:
        """Commit records in one transaction."""
        with self._producer.transaction() as tx:
            for record in records:
                tx.send(outgoing(self.codec, record))

    def read(self, topic: str, kind: type[T]) -> list[T]:
        """All records of a type on a topic."""
        raw = read_topic(self.log, topic, Deadline.after(5, f"read {topic}"))
        decoded: Sequence[object] = [self.codec.decode(record.value or b"") for record in raw]
        return [one for one in decoded if isinstance(one, kind)]
