"""``laminar broker``: a development Kafka in the foreground."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from laminar.schemas.errors import Unavailable

__all__ = ["command"]


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the broker's data and log.")] = Path(
        ".broker"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 9092,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until it must answer.")] = 60.0,
    fetch_only: Annotated[
        bool, typer.Option(help="Only get Java and the jars in place, and say where they are.")
    ] = False,
) -> None:
    """Run a development Kafka broker until Ctrl-C or SIGTERM. The jars come from Maven once, then from a cache."""
    from laminar.streams.broker import Broker, ensure_jars, find_java

    if fetch_only:
        typer.echo(f"Kafka in {ensure_jars()}, Java: {find_java()}")
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    stop = threading.Event()
    broker = Broker(directory, port=port).start(timeout)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        typer.echo(f"Kafka broker on {broker.bootstrap}, data in {broker.directory}; Ctrl-C stops it")
        typer.echo(f"next: laminar run configs/quickstart.yaml log.kind=kafka log.bootstrap={broker.bootstrap}")
        sys.stdout.flush()
        while not stop.wait(0.5):
            if not broker.running:
                raise Unavailable(f"the broker ended by itself (log: {broker.log_file})")
    finally:
        broker.stop()
