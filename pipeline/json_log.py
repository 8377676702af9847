"""Log set-up of a process: JSON lines on stderr, plain lines on a terminal.

Everything goes through it: uncaught exceptions of any thread, and warnings. Secrets that the process was given stand
in no line, whoever wrote it.

>>> set_up(LogLabels(run="first", operator="rollout", instance="rollout-0"), "info")     # doctest: +SKIP
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

__all__ = ["JsonLines", "LogLabels", "PlainLines", "set_up"]

_HIDDEN = "(secret)"
_SHORTEST_SECRET = 4
"""A shorter one would be found in innocent words; nobody should have one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLabels:
    """What every line says about the process; empty where it is not known."""

    run: str = ""
    operator: str = ""
    instance: str = ""


class _Redactor:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({s for s in secrets if len(s) >= _SHORTEST_SECRET}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text


class JsonLines(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, run, operator, instance, logger, message, exception."""

    def __init__(self, labels: LogLabels, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._labels = labels
        self._redact = _Redactor(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "run": self._labels.run,
            "operator": self._labels.operator,
            "instance": self._labels.instance,
            "logger": record.name,
            "message": self._redact(record.getMessage().rstrip("\n")),
        }
        if record.exc_info:
            line["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class PlainLines(logging.Formatter):
    """For a person at a terminal."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._redact = _Redactor(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return self._redact(super().format(record))


def set_up(labels: LogLabels, level: str, secrets: Iterable[str] = ()) -> None:
    """Send this process's log to stderr, with whatever nobody caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines(secrets) if sys.stderr.isatty() else JsonLines(labels, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.error("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    error = args.exc_value or args.exc_type()
    logger.error(
        "uncaught %s in thread %s: %s",
        args.exc_type.__name__,
        name,
        error,
        exc_info=(args.exc_type, error, args.exc_traceback),
    )


def _unraisable(args: Any) -> None:
    error = args.exc_value
    where = args.err_msg or "exception that nobody can catch"
    found = (args.exc_type, error, args.exc_traceback)
    logger.error("%s in %r: %s", where, args.object, error, exc_info=found)
