from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from laminar.pipeline.cli import COMMANDS, main
from laminar.pipeline.commands.read import moment_ms
from laminar.pipeline.commands.table import table
from laminar.schemas.errors import ConfigError

LOADED = """
import sys
from laminar.pipeline.cli import main
code = main(["--help"])
heavy = {"torch", "transformers", "numpy", "pydantic", "pyarrow", "polars", "confluent_kafka", "typer", "rich", "yaml",
         "fastavro", "asyncio"}
print(code, sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"laminar.pipeline.commands.{name}").command.__doc__
    assert main([name, "--help"]) == 0
    assert f"Usage: laminar {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("laminar ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rum"], "error: no command 'rum' (did you mean 'run'?)"),
        (["config", "none.yaml"], "error: none.yaml: cannot read the configuration: No such file or directory"),
        (["run", "none.yaml"], "error: none.yaml: cannot read the configuration: No such file or directory"),
        (["audit", "none.yaml"], "error: none.yaml: cannot read the configuration: No such file or directory"),
        (["example", "sorts", "there"], "error: example: unknown 'sorts' (valid: odds, smollm2, sortl)"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [line]
    assert shown.out == ""


def test_a_missing_argument_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15m", 1_000_000 - 900_000),
        ("1.5s", 998_500),
        ("1234", 1234),
        ("1970-01-01T00:01:00", 60_000),
        ("1970-01-01T01:01:00+01:00", 60_000),
    ],
)
def test_a_moment_is_an_age_a_time_or_milliseconds(text: str, expected: int) -> None:
    assert moment_ms(text, now=1000.0) == expected


def test_what_is_no_moment_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match="valid: 15m, 2026-01-31T12:00:00"):
        moment_ms("yesterday", now=0.0)


def test_tables_align_and_an_empty_one_says_so() -> None:
    assert table([]) == "(nothing)"
    assert table([{"a": "x", "n": 5}, {"a": "long", "n": None}]) == "A     N\nx     5\nlong  -"
