"""Numbers that an operator keeps about itself, for ``/metrics``; it knows nothing of who reads them.

The operator's thread writes, any other may read. Names and meanings are in ``docs/metrics.md``.

>>> measures = Measures()
>>> measures.gauges["rollout_running"] = 12.0
>>> measures.histogram("reward_latency_seconds").observe(0.3)
"""

from __future__ import annotations

from laminar.streams.meter import Histogram

__all__ = ["Measures"]


class Measures:
    """Gauges and histograms by name, without the prefix ``laminar_``."""

    __slots__ = ("gauges", "histograms")

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.histograms: dict[str, Histogram] = {}

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name; made with the first call."""
        found = self.histograms.get(name)
        if found is None:
            found = self.histograms[name] = Histogram()
        return found
