"""What engines that live in the operator's process share: they start and end with it."""

from __future__ import annotations

from laminar.schemas.errors import Unavailable

__all__ = ["InProcess"]


class InProcess:
    """Mixed into an Engine."""

    name: str

    @property
    def ready(self) -> bool:
        """See Engine.ready."""
        return True

    def restart(self, why: str) -> None:
        """See Engine.restart."""
        raise Unavailable(f"engine {self.name}: {why}; its process has to start anew")
