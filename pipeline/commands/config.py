"""``laminar config``: every value and where it came from."""

from __future__ import annotations

import json

import typer

from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides
from laminar.pipeline.config.explaining import explain
from laminar.pipeline.config.loading import load_config

__all__ = ["command"]


def command(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting of a run file and where its value came from. Secrets are hidden."""
    settings = explain(load_config(config, overrides or ()))
    if as_json:
        typer.echo(json.dumps({s.name: {"value": json.loads(s.value), "source": s.source} for s in settings}, indent=2))
        return
    width = max(len(f"{s.name} = {s.value}") for s in settings if len(s.value) <= 60)
    for s in settings:
        typer.echo(f"{f'{s.name} = {s.value}':<{width}}  # {s.source}")
