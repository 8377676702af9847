"""``python -m laminar.pipeline.simulation``: runs seeds; exit code 1 when one of them breaks a rule."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from laminar.pipeline.simulation.campaign import Campaign, failure_text, shrink, workbench


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(prog="python -m laminar.pipeline.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print every event of it")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    chosen = parser.parse_args(arguments)
    say = sys.stdout.write

    def tell(line: str) -> None:
        say(line + "\n")

    seeds = range(chosen.first, chosen.first + chosen.seeds) if chosen.seed is None else [chosen.seed]
    with workbench() as bench:
        if chosen.trace:
            for seed in seeds:
                outcome = bench.run(seed, tell=tell)
                say(f"seed {seed}: digest {outcome.digest}\n")
                if outcome.violations:
                    say(failure_text(outcome, lines=0) + "\n")
                    return 1
            return 0
        campaign = Campaign(bench)
        began = time.process_time()
        campaign.run(seeds, stop_at_first=not chosen.keep_going)
        spent = time.process_time() - began
        for outcome in campaign.failures:
            say(failure_text(shrink(bench, outcome)) + "\n\n")
        for kind, count in campaign.coverage().items():
            say(f"{count:8d}  {kind}\n")
        each_ms = 1000 * spent / max(1, campaign.seeds)
        say(f"{campaign.seeds} seeds in {spent:.0f} s of CPU time ({each_ms:.0f} ms a seed), ")
        say(f"{len(campaign.failures)} broke a rule\n")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # what operators say about faults that are meant to happen
    sys.exit(main())
