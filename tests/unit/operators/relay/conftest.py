from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.relays import RelayRun, relay_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RelayRun]:
    with relay_run(tmp_path) as made:
        yield made
