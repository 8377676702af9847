"""``laminar dead``: dead letters, and what is decided about them."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.pipeline.commands.arguments import AsJson, opened_log
from laminar.pipeline.commands.read import moment_ms
from laminar.pipeline.commands.table import table
from laminar.pipeline.config.schema import did_you_mean
from laminar.pipeline.letter import Filter, described, dump, line_of, row_of
from laminar.pipeline.printing import as_json as plain
from laminar.schemas.codec import Codec
from laminar.schemas.errors import ConfigError, DecodeError
from laminar.streams.dead import Desk, Entry, Gone, Outcome, Register, State, original_of, parse_place, read_letter
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord
from laminar.streams.open import open_codec

__all__ = ["command"]

_ACTIONS = ("list", "show", "retry", "drop")
_STATES: tuple[State, ...] = ("open", "retried", "dropped")
_DUMP_BYTES = 512


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="list, show, retry or drop.", show_default=False)],
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="Run file, or the folder of a run.", show_default=False)
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLACE]... [KEY=VALUE]...",
            help="Places of letters as `list` shows them (0@17); settings that win over the file.",
            show_default=False,
        ),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only letters about records of this topic.")] = None,
    operator: Annotated[str | None, typer.Option(help="Only letters that this operator wrote.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only letters with this kind of error.")] = None,
    state: Annotated[str | None, typer.Option(help="Only open, retried or dropped letters.")] = None,
    since: Annotated[str | None, typer.Option(help="Not before: 15m (ago), ISO time, or epoch milliseconds.")] = None,
    until: Annotated[str | None, typer.Option(help="Before.")] = None,
    member: Annotated[str | None, typer.Option("--id", help="Only letters about this trajectory or group.")] = None,
    every: Annotated[bool, typer.Option("--all", help="retry, drop: all open letters that the filters leave.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="drop: without a question.")] = False,
    raw: Annotated[Path | None, typer.Option(help="show: write the original's bytes to this file.")] = None,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for the whole command.")] = 300.0,
) -> None:
    """List what could not be processed, show it whole, put it on its topic again, or give it up.

    `list` and `show` only read. `retry` puts the original on its topic once, however often and by however many people
    it is asked for; `drop` keeps the letter as the fate of its members. Exit code 1: not every letter is as was asked
    for.
    """
    if action not in _ACTIONS:
        raise ConfigError(f"{action}: no such action ({did_you_mean(action, _ACTIONS)})")
    places = [one for one in rest or () if "=" not in one]
    overrides = [one for one in rest or () if "=" in one]
    _check(action, places, every=every, yes=yes, raw=raw)
    wanted = Filter(
        topic=topic,
        operator=operator,
        kind=kind,
        state=state,
        since_ms=_moment("--since", since),
        until_ms=_moment("--until", until),
        member=member,
    )
    if state is not None and state not in _STATES:
        raise ConfigError(f"--state {state}: no such state ({did_you_mean(state, _STATES)})")
    if places and wanted.given:
        raise ConfigError(f"{places[0]}: give places or filters, not both")
    for place in places:
        parse_place(place)
    deadline = Deadline.after(timeout, f"laminar dead {action}")
    with opened_log(config, overrides) as (run, log):
        codec = open_codec(run.log)
        if action == "list":
            _list(log, codec, wanted, deadline, as_json=as_json)
        elif action == "show":
            _show(log, codec, places[0], deadline, raw=raw, as_json=as_json)
        else:
            _decide(action, log, codec, run.name, places, wanted, deadline, yes=yes)


def _check(action: str, places: Sequence[str], *, every: bool, yes: bool, raw: Path | None) -> None:
    """Raise ConfigError for arguments that do not go together."""
    if action == "list" and places:
        raise ConfigError(f"{places[0]}: `list` takes no places (valid: filters such as --topic; `show {places[0]}`)")
    if action == "show" and len(places) != 1:
        raise ConfigError("`show` takes one place, as `laminar dead list` shows them: laminar dead show CONFIG 0@17")
    if action in ("list", "show") and every:
        raise ConfigError(f"--all: not for `{action}` (valid for: retry, drop)")
    if action in ("retry", "drop") and bool(places) == every:
        raise ConfigError(f"`{action}` takes places (0@17 0@18), or --all with filters, and not both")
    if yes and action != "drop":
        raise ConfigError(f"--yes: not for `{action}` (valid for: drop)")
    if raw is not None and action != "show":
        raise ConfigError(f"--raw: not for `{action}` (valid for: show)")


def _moment(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else moment_ms(text, time.time())
    except ConfigError as error:
        raise ConfigError(str(error).replace("--since", option)) from None


def _read(log: Log, codec: Codec, deadline: Deadline) -> Register:
    register = Register(log, codec)
    with closing(register):
        register.read(deadline)
    return register


def _list(log: Log, codec: Codec, wanted: Filter, deadline: Deadline, *, as_json: bool) -> None:
    register = _read(log, codec, deadline)
    entries = [entry for entry in register.entries.values() if wanted.takes(entry)]
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(line_of(entry), ensure_ascii=False))
        return
    if not entries:
        typer.echo(f"no dead letters{f' that these filters leave, of {n}' if (n := len(register.entries)) else ''}")
        return
    typer.echo(table([row_of(entry) for entry in entries]))
    typer.echo("")
    for (kind, operator, topic), n in Counter(
        (e.letter.kind, e.letter.operator, e.letter.topic) for e in entries
    ).most_common():
        typer.echo(f"{n:>6}  {kind} in {operator} on {topic}")
    states = Counter(entry.state for entry in entries)
    together = ", ".join(f"{states[state]} {state}" for state in _STATES if states[state])
    typer.echo(f"{len(entries):>6}  together: {together}")


def _show(log: Log, codec: Codec, place: str, deadline: Deadline, *, raw: Path | None, as_json: bool) -> None:
    entry = _read(log, codec, deadline).find(place)
    letter = read_letter(log, codec, entry, deadline)
    original: LogRecord | None = None
    gone = ""
    if letter.offset >= 0:
        try:
            original = original_of(log, letter, deadline)
        except Gone as error:
            gone = str(error)
    value = None if original is None else original.value
    if raw is not None:
        if value is None:
            raise ConfigError(f"--raw {raw}: there are no bytes: {gone or 'the letter is not about bytes of a record'}")
        raw.write_bytes(value)
    decoded, reason = _decoded(codec, value)
    headers = [(h.key, h.value) for h in letter.headers] if original is None else list(original.headers)
    if as_json:
        shown = {
            **line_of(entry),
            "headers": [[name, content.decode("utf-8", "replace")] for name, content in headers],
            "bytes": None if value is None else value.hex(),
            "record": decoded,
            "original": gone or None,
        }
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    for line in described(entry):
        typer.echo(line)
    for name, content in headers:
        typer.echo(f"header     {name}: {content!r}")
    if gone:
        typer.echo(f"bytes      {gone}")
    elif original is None:
        typer.echo("bytes      none: a retry begins the trajectory anew, from its prompt")
    elif value is None:
        typer.echo("bytes      none: the record has no value")
    else:
        kept = f", written to {raw}" if raw is not None else ""
        typer.echo(f"bytes      {len(value)}{kept}")
        for line in dump(value[:_DUMP_BYTES]):
            typer.echo(line)
        if len(value) > _DUMP_BYTES:
            typer.echo(f"           ... {len(value) - _DUMP_BYTES} more (--raw FILE writes all)")
        typer.echo(f"record     {reason or json.dumps(decoded, ensure_ascii=False)}")


def _decoded(codec: Codec, value: bytes | None) -> tuple[Any, str]:
    """The record as JSON, or why it is none."""
    if value is None:
        return None, "none"
    try:
        record = codec.decode(value)
    except DecodeError as error:
        return None, f"does not decode: {error}"
    return {"type": type(record).__name__, **plain(record)}, ""


def _decide(
    action: str,
    log: Log,
    codec: Codec,
    run_id: str,
    places: Sequence[str],
    wanted: Filter,
    deadline: Deadline,
    *,
    yes: bool,
) -> None:
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    if action == "drop" and not yes:
        _ask(log, codec, places, wanted, deadline)
    with closing(Desk(log, codec, run_id, by=by, deadline=deadline)) as desk:
        entries = _chosen(desk.register, places, wanted)
        if not entries:
            typer.echo(f"no open dead letter{' that these filters leave' if wanted.given else ''}: nothing done")
            return
        act: Callable[[Entry], Outcome] = desk.retry if action == "retry" else desk.drop
        done = refused = 0
        for entry in entries:
            try:
                outcome = act(entry)
            except Gone as error:
                refused += 1
                sys.stdout.flush()
                typer.echo(f"error: {error}", err=True)
                continue
            done += outcome.done
            refused += not outcome.as_wanted
            typer.echo(outcome.text)
        if len(entries) > 1:
            verb = {"retry": "retried", "drop": "dropped"}[action]
            typer.echo(f"{done} {verb}, {len(entries) - done - refused} already were, {refused} not")
        if action == "retry" and done and desk.run_has_ended:
            typer.echo("the run has ended: what was retried is taken up when it is resumed (`laminar run`)")
    if refused:
        raise typer.Exit(1)


def _chosen(register: Register, places: Sequence[str], wanted: Filter) -> list[Entry]:
    if places:
        return list(dict.fromkeys(map(register.find, dict.fromkeys(places))))
    found = [entry for entry in register.entries.values() if wanted.takes(entry)]
    return found if wanted.state is not None else [entry for entry in found if entry.state == "open"]


def _ask(log: Log, codec: Codec, places: Sequence[str], wanted: Filter, deadline: Deadline) -> None:
    """Raises ConfigError where nobody can be asked, Exit on no."""
    if not sys.stdin.isatty():
        raise ConfigError("drop: there is no terminal to ask on (valid: --yes)")
    entries = [entry for entry in _chosen(_read(log, codec, deadline), places, wanted) if entry.state == "open"]
    members = sum(len(entry.letter.trajectory_ids) for entry in entries)
    question = f"drop {len(entries)} letter(s) for good; {members} member(s) stay dead?"
    if entries and not typer.confirm(question):
        raise typer.Exit(1)
