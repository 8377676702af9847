"""What a simulation finds wrong."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule."""

    rule: str
    """Its short name."""
    detail: str
    at: float = 0.0
    """Seconds after the start."""

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.rule}: {self.detail}"
