"""Whole messages over a socket, without ever waiting for the other end: what cannot be sent yet is kept.

>>> import socket
>>> here, there = (Stream(end) for end in socket.socketpair())
>>> here.send(b"hello"), there.receive()
(None, [b'hello'])
>>> here.close(), there.receive(), there.closed, there.close()
(None, [], True, None)
"""

from __future__ import annotations

import select
import socket
import struct

__all__ = ["Stream"]

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Stream:
    """See the module's docstring. It owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._poll = select.poll()
        self._fd = end.fileno()
        self._unsent = bytearray()
        self._unread = bytearray()
        self.closed = False
        """The other end is gone, and everything that it had sent was received."""

    @property
    def unsent(self) -> int:
        """Bytes that the other end had no room for yet."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send it, now or with a later ``flush``. To a closed stream: nothing."""
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Send what the other end has room for."""
        while self._unsent:
            try:
                n = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # gone; what it sent before may still be received
                self._unsent.clear()
                return
            del self._unsent[:n]

    def receive(self) -> list[bytes]:
        """All messages that have come."""
        while not self.closed:
            try:
                part = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                part = b""
            if not part:
                self.closed = True
            self._unread += part
            if len(part) < _READ_BYTES:
                break
        return self._messages() if self._unread else []

    def _messages(self) -> list[bytes]:
        found = []
        at, end, buffer = 0, len(self._unread), self._unread
        while end - at >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(buffer, at)
            if end - at - _LENGTH.size < n:
                break
            at += _LENGTH.size
            found.append(bytes(buffer[at : at + n]))
            at += n
        del buffer[:at]
        return found

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, or what is unsent can be sent, or the time is over."""
        if self.closed:
            return
        self._poll.register(self._fd, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        self._poll.poll(max(0.0, timeout_s) * 1000)

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._unsent.clear()
        self._socket.close()
