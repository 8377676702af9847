"""How to make an engine, as data: so that another process can make the same one.

>>> Recipe(factory="laminar.operators.rollout.engines.choice:scripted", options={"max_running": 8}).build().name
'scripted-1'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from laminar.operators.rollout.engine import Engine
from laminar.operators.rollout.engines.memory import is_shortage, shortage
from laminar.schemas.errors import ConfigError

__all__ = ["Recipe"]

_LONGEST = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """See the module's docstring."""

    factory: str
    """``module:function``, or a class: called with the options, it returns an Engine."""
    options: Mapping[str, Any]
    """What JSON knows. Those of a model's engine (``model_path``, ``kv_total``, ...) are named as the engines do."""

    @property
    def environment(self) -> dict[str, str]:
        """What a process that is to run it needs in its environment before its first import."""
        given = {str(name): str(value) for name, value in self.options.get("env", {}).items()}
        return {**given, "OMP_NUM_THREADS": str(self.options["threads"])} if "threads" in self.options else given

    def build(self) -> Engine:
        """Make it here. Raises ConfigError; where memory is what is wanting, with the numbers."""
        module, _, name = self.factory.partition(":")
        try:
            return cast("Engine", getattr(import_module(module), name)(**self.options))
        except (ConfigError, MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            raise ConfigError(
                f"engine: not enough memory to start: {shortage(self.options)} ({_line(error)})"
            ) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
