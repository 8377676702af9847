from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

from laminar.pipeline.json_log import JsonLines, LogLabels

LABELS = LogLabels(run="first", operator="rollout", instance="rollout-0")


def lines_of(program: str) -> list[dict[str, Any]]:
    head = (
        "import logging, sys, threading, warnings\n"
        "from laminar.pipeline.json_log import LogLabels, set_up\n"
        "set_up(LogLabels(run='first', operator='rollout', instance='rollout-0'), 'info', ['hunter22', 'abc'])\n"
    )
    done = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_one_object_a_line_with_time_in_utc_and_the_process() -> None:
    record = logging.LogRecord("laminar.x", logging.WARNING, __file__, 1, "two\nlines %d", (7,), None)
    record.created = 0.25
    assert json.loads(JsonLines(LABELS).format(record)) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "run": "first",
        "operator": "rollout",
        "instance": "rollout-0",
        "logger": "laminar.x",
        "message": "two\nlines 7",
    }


def test_uncaught_exceptions_of_any_thread_and_warnings_are_lines_too() -> None:
    lines = lines_of(
        "warnings.warn('careful')\n"
        "class Bad:\n    def __del__(self): raise KeyError('gone')\n"
        "Bad()\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='side')\n"
        "thread.start(); thread.join()\n"
        "raise RuntimeError('a bug')\n"
    )
    warning, unraisable, side, last = lines
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "UserWarning: careful" in warning["message"]
    assert "KeyError" in unraisable["exception"]
    assert side["message"] == "uncaught ZeroDivisionError in thread side: division by zero"
    assert last["message"] == "uncaught RuntimeError: a bug"
    assert last["exception"].endswith("RuntimeError: a bug")
    assert {line["instance"] for line in lines} == {"rollout-0"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)


def test_a_secret_stands_in_no_line_whoever_wrote_it() -> None:
    lines = lines_of(
        "logging.getLogger('other').error('sasl said %s', 'user:hunter22@host')\n"
        "raise RuntimeError('password hunter22 is wrong; abc')\n"
    )
    assert lines[0]["message"] == "sasl said user:(secret)@host"
    assert "hunter22" not in json.dumps(lines)
    assert lines[1]["message"].endswith("abc")  # too short to be one
