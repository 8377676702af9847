"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.broker import broker

__all__ = ["broker"]

# Shared, noisy machines: no example has a time limit, and the same examples are drawn each time.
settings.register_profile(
    "laminar", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laminar")
