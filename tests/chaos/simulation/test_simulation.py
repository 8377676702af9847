"""Seeds of the simulated run: no rule is broken, and the same seed is the same run, to the last byte."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laminar.pipeline.simulation.__main__ import main
from laminar.pipeline.simulation.campaign import Campaign, failure_text, shrink, workbench
from tests.chaos.simulation.mutations import MUTATIONS

SEEDS = int(os.environ.get("LAMINAR_SIMULATION_SEEDS", "400"))

_DIGESTS = """
import logging
from laminar.pipeline.simulation.campaign import workbench
logging.disable(logging.CRITICAL)
with workbench() as bench:
    for seed in range(6):
        print(bench.run(seed).digest)
"""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Operators say much about faults that are meant to happen, and formatting it costs as much as the run."""
    caplog.set_level("CRITICAL", logger="laminar")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_b1_b15_a12_no_seed_breaks_a_rule_and_every_kind_of_fault_is_met() -> None:
    with workbench() as bench:
        campaign = Campaign(bench)
        campaign.run(range(SEEDS), stop_at_first=True)
        if campaign.failures:
            pytest.fail(failure_text(shrink(bench, campaign.failures[0])))
    never = [kind for kind, count in campaign.coverage().items() if not count]
    assert never == []


def test_the_same_seed_is_the_same_run_in_another_process_with_another_hash_seed() -> None:
    def digests(hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        )
        return done.stdout.split()

    first = digests("1")
    assert len(set(first)) == 6
    assert digests("2") == first


def test_a_failure_names_the_command_that_replays_it_and_needs_fewer_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS["redo_after_unknown"]
    mutation.apply(monkeypatch)
    with workbench() as bench:
        found = bench.run(mutation.seed)
        assert found.violations
        less = shrink(bench, found)
        assert 0 < len(less.faults) < len(found.faults)
        assert bench.run(mutation.seed, faults=less.faults).digest == less.digest
    assert f"--seed {mutation.seed} --trace" in failure_text(less)
    assert less.violations[0].rule in failure_text(less)


def test_the_command_prints_what_was_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert "optimizer steps" in told
    assert "2 seeds in" in told


def test_the_command_fails_with_a_seed_that_breaks_a_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutation = MUTATIONS["redo_after_unknown"]
    mutation.apply(monkeypatch)
    assert main(["--first", str(mutation.seed), "--seeds", "1"]) == 1
    assert f"seed {mutation.seed} breaks a rule" in capsys.readouterr().out
    assert main(["--seed", str(mutation.seed), "--trace"]) == 1
    assert "starts" in capsys.readouterr().out
