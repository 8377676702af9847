"""Fixtures of the rollout tests."""

from __future__ import annotations

import pytest

from tests.unit.operators.rollout.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A memory log with every topic, and version 0 published."""
    made = Stage()
    made.publish(0)
    return made
