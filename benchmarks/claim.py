"""How a benchmark reports: a table for people, then one JSON line for each claim.

A claim is a number beside its goal, with the reference measured in the same run (design section 8).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

__all__ = ["Claim", "best_ms", "quick_from_arguments", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One performance claim of the README."""

    name: str
    ratio: float
    """The measured value, in ``unit``."""
    goal: float
    unit: str
    """``x``: times the reference; else the unit of an absolute goal."""
    lower_is_better: bool

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.ratio <= self.goal if self.lower_is_better else self.ratio >= self.goal


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], claims: Sequence[Claim]) -> None:
    """Print the table, then the claims, one JSON line each, to stdout."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console().print(table)
    for claim in claims:
        print(json.dumps({**asdict(claim), "ratio": float(f"{claim.ratio:.4g}")}), flush=True)


def quick_from_arguments(doc: str | None) -> bool:
    """Parse a benchmark's command line: ``--quick`` measures less."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="measure less: seconds instead of a minute")
    return bool(parser.parse_args().quick)


def best_ms(call: Callable[[], object], *, rounds: int, calls: int) -> float:
    """Milliseconds of one call: the best of ``rounds`` means over ``calls``; other load only ever adds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e3


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
