"""Kills what a supervisor leaves behind, even after kill -9 of the supervisor.

Started with a pipe as its standard input: ``+123`` registers process group 123, ``-123`` forgets it. When the pipe
closes, for whatever reason, every registered group is killed. It imports nothing, so it starts in milliseconds.
"""

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Serve one supervisor until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
