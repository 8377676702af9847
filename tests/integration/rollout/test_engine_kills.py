"""Engines in processes of their own, killed in the middle of generation ten times in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.rollout.engine_kills import check_run, run_and_kill, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a6_ten_engines_killed_while_they_sample_cost_no_trajectory_and_no_token(tmp_path: Path) -> None:
    write_run(tmp_path, "{kind: torch, process: own, max_running: 16, restart_backoff_s: 0.05}", steps=20)
    code, said, told, killed = run_and_kill(tmp_path, kills=10, timeout_s=500)
    check_run(tmp_path, code, said, told, killed=killed)
    assert killed >= 10
