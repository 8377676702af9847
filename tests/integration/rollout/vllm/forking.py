"""Runs the ``laminar`` command in forks of one process that has imported vLLM already, which takes seconds each time.

A line ``{"arguments": [...], "errors": PATH, "without": MODULE or null}`` on stdin is answered by a line with the exit
code. What a fork says on stderr goes to the file; it is killed after two minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["Forks"]

_LIMIT_S = 120


class Forks:
    """The other end. Use it as a context."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def laminar(self, *arguments: str, errors: Path, without: str | None = None) -> int:
        """Exit code of the command; negative: the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"arguments": arguments, "errors": str(errors), "without": without}) + "\n"
        )
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()


def _child(arguments: list[str], errors: str, without: str | None) -> int:
    from laminar.pipeline.cli import main

    signal.alarm(_LIMIT_S)
    to = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    if without is not None:
        sys.modules.pop(without, None)
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == without else real(name, package)
    return main(arguments)


def serve() -> None:
    """Answer until stdin ends."""
    import transformers  # noqa: F401
    import vllm.v1.engine.llm_engine

    import laminar.pipeline.process  # noqa: F401

    assert vllm.v1.engine.llm_engine
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = _child(asked["arguments"], asked["errors"], asked["without"])
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    serve()
