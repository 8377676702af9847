"""Imported by Python at its start where this folder is on PYTHONPATH: lets a test set one process's wall clock.

``SOAK_CLOCKS`` is a folder; the file ``{operator}-{index}`` in it holds seconds to add. It is looked at once a second.
"""

import os
import sys
import time

_FOLDER = os.environ.get("SOAK_CLOCKS")
_WORDS = sys.orig_argv


def _install(path: str) -> None:
    real, monotonic = time.time, time.monotonic
    state = [0.0, -1.0]

    def shifted() -> float:
        if monotonic() >= state[1]:
            state[1] = monotonic() + 1.0
            try:
                with open(path) as file:
                    state[0] = float(file.read() or 0)
            except (OSError, ValueError):
                pass
        return real() + state[0]

    time.time = shifted


if _FOLDER and "laminar.pipeline.process" in _WORDS:
    _at = _WORDS.index("laminar.pipeline.process")
    if len(_WORDS) > _at + 2:
        _install(os.path.join(_FOLDER, f"{_WORDS[_at + 1]}-{_WORDS[_at + 2]}"))
