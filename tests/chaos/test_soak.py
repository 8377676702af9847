"""A short campaign with a fixed seed: `make soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak.campaign import Campaign
from tests.chaos.soak.deployment import Deployment
from tests.chaos.soak.fault import BROKER, SUPERVISOR, plan
from tests.chaos.soak.report import write_report

KILLS = 10
SEED = 4


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_b1_whatever_is_killed_every_sample_has_one_fate(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, rollouts=2, rewards=1, repacks=2)
    faults = plan(seed=SEED, kills=KILLS, instances=deployment.instances, mean_gap_s=1.5)
    found = Campaign(deployment, faults, stall_bound_s=240.0).run()
    assert found.ledger.balanced
    assert (found.lost, found.twice, found.wrong) == (0, 0, ())
    assert found.ledger.trained > 0


def test_a_plan_is_a_function_of_its_seed_and_kills_as_many_as_asked() -> None:
    instances = Deployment(Path("anywhere")).instances
    made = plan(seed=3, kills=200, instances=instances)
    assert made == plan(seed=3, kills=200, instances=instances)
    assert made != plan(seed=4, kills=200, instances=instances)
    assert 200 <= sum(fault.kills for fault in made) <= 201
    killed = {target for fault in made if fault.kills for target in fault.targets}
    assert killed == {*instances, BROKER, SUPERVISOR}
    assert sum(fault.kind == "broker_away" for fault in made) == 2
    assert {fault.kind for fault in made} >= {"pause", "pause_broker", "disk", "clock", "clock_step"}
    assert any(len(fault.targets) == 2 for fault in made)


def test_a_report_replaces_what_stands_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak report -->\nold\n<!-- end of soak report -->\nafter\n")
    campaign = Campaign(Deployment(tmp_path), [])
    campaign.failure = "interrupted"
    write_report(page, campaign, seed=1, asked=2)
    text = page.read_text()
    assert text.startswith("before\n<!-- soak report -->\n`python -m tests.chaos.soak --kills 2 --seed 1`: **failed**")
    assert text.endswith("<!-- end of soak report -->\nafter\n")
    assert "old" not in text
