"""Tells systemd how the process is (sd_notify(3)): ready, stopping, and, as its watchdog, that the loop lives.

Without ``NOTIFY_SOCKET`` in the environment, as everywhere but in a unit of ``Type=notify``, nothing happens.

>>> notifier = Notifier({})
>>> notifier.say("READY=1")
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """See the module's docstring. May be used from any thread."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._watched = bool(environ.get("WATCHDOG_USEC"))

    def say(self, *lines: str) -> None:
        """Send assignments. A systemd that does not listen is not worth an error."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def beat(self, reasons: list[str]) -> None:
        """Feed the watchdog, unless there are reasons why the process does not live."""
        if self._watched and not reasons:
            self.say("WATCHDOG=1")
