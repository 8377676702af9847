"""``python -m tests.chaos.soak --kills 200 [--seed N] [--report FILE]``: see docs/reliability.md.

Exit code 0: the campaign ended with a balanced ledger; 1: it did not, and its folder is kept.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.chaos.soak.campaign import Campaign, CampaignFailed
from tests.chaos.soak.deployment import Deployment
from tests.chaos.soak.fault import plan
from tests.chaos.soak.report import write_report


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="processes to kill with kill -9 (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--gap", type=float, default=3.5, help="mean seconds between two faults (default 3.5)")
    parser.add_argument("--stall", type=float, default=120.0, help="longest seconds without an optimizer step (120)")
    parser.add_argument("--report", type=Path, help="Markdown file; between its markers where it has them")
    parser.add_argument("--folder", type=Path, help="new folder for everything; kept (default: a temporary one)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="laminar-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    deployment = Deployment(folder)
    faults = plan(seed=given.seed, kills=given.kills, instances=deployment.instances, mean_gap_s=given.gap)
    campaign = Campaign(deployment, faults, stall_bound_s=given.stall)
    _say(f"{len(faults)} faults, {sum(f.kills for f in faults)} kills; everything in {folder}")
    code = 1
    try:
        campaign.run()
        code = 0
    except CampaignFailed as error:
        sys.stderr.write(f"FAILED: {error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
    finally:
        report = given.report or folder / "report.md"
        write_report(report, campaign, seed=given.seed, asked=given.kills)
        _say(report.read_text(encoding="utf-8") if given.report is None else f"report: {report}")
        if code == 0 and given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
