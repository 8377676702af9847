"""Where an engine's process begins: it, and every process that it starts, never outlive the one that started it.

``python -m laminar.operators.rollout.engines.remote.bond SOCKET LIFELINE``, both file descriptors.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

__all__ = ["bind"]

_LOOK_MS = 500
_MOST_FDS = 4096


def bind(lifeline: int) -> None:
    """Kill this process's group when the other end of ``lifeline``, a pipe, closes. Called before any thread is there.

    A process of its own watches for that: it needs nothing of this one, which may hang or be stopped. It goes when
    this one has ended.
    """
    group = os.getpid()
    if os.fork():
        os.close(lifeline)
        return
    try:
        _watch(lifeline, group)
    finally:
        os._exit(0)


def _watch(lifeline: int, group: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, lifeline)
    os.closerange(lifeline + 1, _MOST_FDS)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while os.getppid() == group:
        if poll.poll(_LOOK_MS):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return


def _main() -> int:
    bind(int(sys.argv[2]))
    from laminar.operators.rollout.engines.remote.main import main  # after the fork: numpy may start threads

    return main(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(_main())
