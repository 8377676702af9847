"""``laminar example``: prompts and a model that can do some of them, as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="sortl, odds or smollm2.", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it is written.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    force: Annotated[bool, typer.Option(help="Make a finished example anew.")] = False,
) -> None:
    """Write an example: prompts for training, held-out prompts, and model/, an ordinary Hugging Face folder."""
    from laminar.pipeline.examples import write

    write(name, directory, seed=seed, force=force, say=typer.echo)
