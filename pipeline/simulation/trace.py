"""What happened, one line an event, and a digest of all of it: two runs of a seed have the same digest, or a bug."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

__all__ = ["Trace"]


class Trace:
    """Keeps the last lines; the digest is over all of them."""

    def __init__(
        self, elapsed: Callable[[], float], *, keep: int = 80, tell: Callable[[str], None] | None = None
    ) -> None:
        """``tell`` is called with every line, as it comes."""
        self._elapsed = elapsed
        self._tell = tell
        self._digest = hashlib.blake2b(digest_size=16)
        self.last: deque[str] = deque(maxlen=keep)
        """The newest lines."""

    def add(self, who: str, text: str) -> None:
        """One event."""
        line = f"{self._elapsed():9.4f} {who:<10} {text}"
        self._digest.update(line.encode())
        self.last.append(line)
        if self._tell is not None:
            self._tell(line)

    def mix(self, data: bytes) -> None:
        """Bytes that the digest covers and no line shows."""
        self._digest.update(data)

    @property
    def digest(self) -> str:
        """Of everything so far, hexadecimal."""
        return self._digest.hexdigest()
