"""vLLM in processes of their own, killed in the middle of generation (``LAMINAR_ENGINE_KILLS`` times) in a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.rollout.engine_kills import check_run, run_and_kill, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("LAMINAR_ENGINE_KILLS", "2"))
"""Each is a start of vLLM, 10 to 20 s of CPU."""
ENGINE = "{kind: vllm, process: own, max_running: 16, max_model_len: 192, restart_backoff_s: 0.05}"


def test_a6_vllm_killed_while_it_samples_costs_no_trajectory_and_no_token(tmp_path: Path) -> None:
    write_run(tmp_path, ENGINE, steps=2 * KILLS)
    code, said, told, killed = run_and_kill(tmp_path, kills=KILLS, timeout_s=300 + 300 * KILLS)
    check_run(tmp_path, code, said, told, killed=killed)
    assert killed >= KILLS
