"""Shows a View: as a live picture on a terminal, as one log line every few seconds elsewhere.

>>> print(one_line(view))                                                               # doctest: +SKIP
step 12/64 version 12 reward 0.41 staleness 1.2 (max 3) tokens/s 4200 running 96 left 0:41
"""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laminar.pipeline.view import View

__all__ = ["LineScreen", "LiveScreen", "Screen", "curve", "minutes", "one_line", "picture"]

_BARS = " ▁▂▃▄▅▆▇█"
_WELL = frozenset({"starting", "running", "sampling", "idle", "loading"})
_STATE_STYLES = {
    "running": "green",
    "sampling": "green",
    "loading": "cyan",
    "idle": "dim",
    "starting": "cyan",
    "waiting": "yellow",
}

logger = logging.getLogger(__name__)


def minutes(seconds: float | None) -> str:
    """``m:ss``, or ``-`` when unknown."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def curve(values: tuple[float, ...], width: int = 40) -> str:
    """A small curve, one character a value or a mean of several, scaled to its own range.

    >>> curve((0.0, 0.5, 1.0))
    '▁▅█'
    """
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = tuple(sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a)
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[1 + round((value - low) / span * 7)] for value in values)


def one_line(view: View) -> str:
    """The view as one line for a log."""
    reward = f"{view.rewards[-1]:.2f}" if view.rewards else "-"
    parts = [
        f"step {view.step}/{view.steps}",
        f"version {view.version}",
        f"reward {reward}",
        f"staleness {view.staleness.mean:.1f} (max {view.staleness.max})",
        f"tokens/s {view.tokens_per_s:.0f}",
        f"sampling {view.running}",
        "lag " + (" ".join(f"{lag.topic}={lag.records}" for lag in view.lags) or "-"),
        f"left {minutes(view.left_s)}",
    ]
    unwell = [item for item in view.instances if item.state not in _WELL]
    if unwell:
        parts.append("; ".join(f"{item.instance} {item.state}" for item in unwell))
    return "  ".join(parts)


def picture(view: View) -> RenderableType:
    """The view as a picture for a terminal."""
    head = Table.grid(padding=(0, 2))
    reward = f"{view.rewards[-1]:.2f}" if view.rewards else "-"
    before = f"{view.accuracy_before:.2f}" if view.accuracy_before is not None else "-"
    after = f"{view.accuracy_after:.2f}" if view.accuracy_after is not None else "-"
    head.add_row(
        "step", f"[bold]{view.step}[/] of {view.steps}", ProgressBar(total=view.steps, completed=view.step, width=40)
    )
    head.add_row("reward", f"[bold]{reward}[/]", Text(curve(view.rewards), style="cyan"))
    stale = f"mean {view.staleness.mean:.1f}, p99 {view.staleness.p99}, max {view.staleness.max}"
    head.add_row("version", f"[bold]{view.version}[/]", f"staleness {stale}")
    head.add_row("held out", f"{before} → {after}", f"{view.tokens_per_s:,.0f} tokens/s, {view.running} being sampled")
    dropped = ", ".join(f"{count} {reason}" for reason, count in view.dropped.items()) or "none"
    head.add_row("trained", f"{view.trained}", f"dropped: {dropped}")
    head.add_row("time", minutes(view.elapsed_s), f"left about {minutes(view.left_s)}")
    processes = Table(box=None, padding=(0, 2), header_style="dim")
    names = max((len(item.instance) for item in view.instances), default=0)
    processes.add_column("process", no_wrap=True, min_width=names)
    processes.add_column("state", no_wrap=True, min_width=8)
    processes.add_column("", no_wrap=True, max_width=28)  # the only one that may be cut
    processes.add_column("restarts", no_wrap=True, min_width=8)
    for item in view.instances:
        style = _STATE_STYLES.get(item.state, "")
        restarts = str(item.restarts) if item.restarts else ""
        processes.add_row(item.instance, Text(item.state, style=style), Text(item.detail, style="dim"), restarts)
    lags = Table(box=None, padding=(0, 2), header_style="dim")
    lags.add_column("topic", no_wrap=True, min_width=max((len(lag.topic) for lag in view.lags), default=0))
    lags.add_column("lag", justify="right", no_wrap=True, min_width=5)
    lags.add_column("group", no_wrap=True)
    for lag in view.lags:
        lags.add_row(lag.topic, f"{lag.records}", Text(lag.group, style="dim"))
    below = Table.grid(padding=(0, 4))
    below.add_row(processes, lags)
    title = f"laminar · {view.run_id}" + (f" · ended: {view.ended}" if view.ended else "")
    return Panel(Group(head, Text(), below), title=title, title_align="left", expand=False)


class Screen(Protocol):
    """Where the supervisor shows the view."""

    def show(self, view: View) -> None:
        """Take the newest view."""

    def close(self) -> None:
        """Leave the last one standing."""


class LiveScreen:
    """A picture that is drawn anew; log lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, view: View) -> None:
        """See Screen."""
        self._live.update(picture(view), refresh=True)

    def close(self) -> None:
        """See Screen."""
        self._live.stop()


class LineScreen:
    """A log line every ``period_s``."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next = 0.0

    def show(self, view: View) -> None:
        """See Screen."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._period_s
            logger.info("%s", one_line(view))

    def close(self) -> None:
        """See Screen."""
