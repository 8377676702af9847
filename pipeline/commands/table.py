"""Plain tables on stdout: columns aligned, numbers to the right, nothing that a pipe would choke on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["table"]


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows under their keys.

    >>> print(table([{"topic": "prompts", "lag": 3}]))
    TOPIC    LAG
    prompts    3
    """
    if not rows:
        return "(nothing)"
    columns = list(rows[0])
    cells = [[name.upper() for name in columns]] + [[_text(row[name]) for name in columns] for row in rows]
    right = [all(isinstance(row[name], int | float | None) for row in rows) for name in columns]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        padded = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
