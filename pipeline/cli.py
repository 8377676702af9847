"""The ``laminar`` command.

``laminar --help`` reads only the table below, so it answers at once; a command's module, and what that needs, is
imported when the command is called. Errors are one line each on stderr; exit codes are those of ``exit_code``, but 2
for a wrong command line or configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, str] = {
    "run": "Run all operators of a run file on this machine, with a live view on a terminal.",
    "operator": "Run one operator as a long-running consumer, with /livez, /readyz and /metrics.",
    "config": "Print every setting of a run file and where its value came from.",
    "audit": "Print the ledger: one fate per sample; exit 1 if it does not balance.",
    "dead": "List, show, retry or drop dead letters: what could not be processed.",
    "topics": "List the topics of a run's log.",
    "read": "Print records of a topic, decoded, by offset or time.",
    "lag": "Print how far each consumer group is behind, per partition.",
    "broker": "Run a development Kafka broker in the foreground.",
    "example": "Write an example: prompts and a small warmed-up model, as plain files.",
}
"""Command -> what it does; the code is ``laminar.pipeline.commands.NAME:command``."""


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "Usage: laminar COMMAND [ARGUMENTS]",
        "",
        "Asynchronous RL post-training of language models as a dataflow over a durable log.",
        "",
        "Commands:",
        *(f"  {name:<{width}}{text}" for name, text in COMMANDS.items()),
        "",
        "Options:",
        f"  {'--version':<{width}}Print the version.",
        f"  {'--help':<{width}}Print this; after a command: its arguments.",
        "",
        "First steps:",
        "  laminar example sortl examples/sortl",
        "  laminar run configs/quickstart.yaml",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    try:
        if name in ("--help", "-h", "help"):
            sys.stdout.write(_help())
            return 0
        if name == "--version":
            from laminar import __version__

            sys.stdout.write(f"laminar {__version__}\n")
            return 0
        if name not in COMMANDS:
            return _unknown(name)
        return _call(name, arguments[1:])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _unknown(name: str) -> int:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(COMMANDS)}"
    sys.stderr.write(f"error: no command '{name}' ({hint})\n")
    return 2


def _call(name: str, arguments: list[str]) -> int:
    from importlib import import_module

    import typer

    from laminar.pipeline.exit_code import USAGE, exit_code_of
    from laminar.schemas.errors import ConfigError, LaminarError

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["--help", "-h"]})(
        import_module(f"laminar.pipeline.commands.{name}").command
    )
    try:
        app(arguments, prog_name=f"laminar {name}")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except LaminarError as error:
        sys.stdout.flush()
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return USAGE if isinstance(error, ConfigError) else exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
