"""A TCP proxy between two ends of a test: it can hold back, or change, what the server answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

__all__ = ["Proxy"]


class Proxy:
    """Forwards to ``127.0.0.1:port``. ``change`` sees every piece of an answer; ``gate`` lets answers through."""

    def __init__(self, port: int) -> None:
        self.change: Callable[[bytes], bytes] = lambda piece: piece
        self.gate = threading.Event()
        self.gate.set()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        """Cut every connection."""
        self._stop.set()
        self.gate.set()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for end in [*self._sockets, self._listener]:
            end.close()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            self._start(lambda a=client, b=server: self._copy(a, b, answer=False))  # type: ignore[misc]
            self._start(lambda a=server, b=client: self._copy(a, b, answer=True))  # type: ignore[misc]

    def _copy(self, source: socket.socket, sink: socket.socket, *, answer: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(16384):
                if answer:
                    self.gate.wait()
                    piece = self.change(piece)
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
