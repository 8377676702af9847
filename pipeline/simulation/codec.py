"""A codec that decodes the same bytes once: the operators of a simulation share what they read."""

from __future__ import annotations

from laminar.schemas.codec import Codec
from laminar.schemas.records import Record

__all__ = ["SharedCodec"]


class SharedCodec(Codec):
    """Records are immutable, so one of them serves all."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Record] = {}

    def decode(self, data: bytes) -> Record:
        """See Codec."""
        known = self._known.get(data)
        if known is None:
            known = self._known[data] = super().decode(data)
        return known

    def forget(self) -> None:
        """Before the next seed."""
        self._known.clear()
