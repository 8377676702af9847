"""The campaign in Markdown, for docs/reliability.md."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import libversion
from confluent_kafka import version as client_version

from laminar.streams.broker import KAFKA_VERSION
from tests.chaos.soak.campaign import Campaign

__all__ = ["write_report"]

_BEGIN, _END = "<!-- soak report -->", "<!-- end of soak report -->"

_KINDS = {
    "kill": "kill -9",
    "clock": "kill -9, successor's clock set by up to an hour",
    "clock_step": "clock set by up to an hour while it runs",
    "pause": "stopped and woken (zombie)",
    "disk": "no file may grow (full disk)",
    "kill_broker": "kill -9",
    "pause_broker": "stopped and woken",
    "broker_away": "away for two minutes",
}


def write_report(path: Path, campaign: Campaign, *, seed: int, asked: int) -> None:
    """Write it to ``path``; between the two markers, where the file has them."""
    text = "\n".join(_lines(campaign, seed, asked)) + "\n"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if _BEGIN in before and _END in before:
        head, _, rest = before.partition(_BEGIN)
        tail = rest.partition(_END)[2]
        text = f"{head}{_BEGIN}\n{text}{_END}{tail}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _lines(campaign: Campaign, seed: int, asked: int) -> Iterator[str]:
    seen, done = campaign.seen, campaign.done
    killed = sum(fault.kills for fault in done)
    yield f"`python -m tests.chaos.soak --kills {asked} --seed {seed}`: {_verdict(campaign)}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in _facts(campaign, killed):
        yield f"| {name} | {value} |"
    yield ""
    yield "| fault | of | times |"
    yield "|---|---|---|"
    counts: Counter[tuple[str, str]] = Counter()
    for fault in done:
        counts.update((fault.kind, _operator(target)) for target in fault.targets)
    for (kind, operator), n in sorted(counts.items()):
        yield f"| {_KINDS[kind]} | {operator} | {n} |"
    pairs = sum(fault.kind == "kill" and len(fault.targets) > 1 for fault in done)
    yield f"| two processes in the same moment | | {pairs} |"
    yield ""
    yield "| from kill -9 until ready again | n | median s | longest s |"
    yield "|---|---|---|---|"
    by_operator: dict[str, list[float]] = {}
    for recovery in seen.recoveries:
        if recovery.seconds is not None:
            name = _operator(recovery.instance)
            name += " (after kill -9 of the supervisor)" if "supervisor" in recovery.kind else ""
            by_operator.setdefault(name, []).append(recovery.seconds)
    for name, times in sorted(by_operator.items()):
        yield f"| {name} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |"


def _verdict(campaign: Campaign) -> str:
    if campaign.failure is not None:
        return f"**failed**: {campaign.failure.splitlines()[0]}"
    found = campaign.evidence
    assert found is not None
    return f"**{found.lost} lost, {found.twice} twice**, the ledger balances."


def _facts(campaign: Campaign, killed: int) -> Iterator[tuple[str, str]]:
    seen, found = campaign.seen, campaign.evidence
    yield "processes killed with kill -9", str(killed)
    yield "time", f"{campaign.wall_s / 60:.1f} min"
    yield "optimizer steps", f"{seen.step} ({max(0, seen.steps_seen - seen.step)} made again after a crash)"
    yield "longest time without an optimizer step", f"{seen.longest_stall_s:.1f} s"
    if seen.longest_away_s:
        yield "the same around two minutes without a broker", f"{seen.longest_away_s:.1f} s"
    yield "`laminar run` started", f"{campaign.deployment.starts} times"
    if found is not None:
        ledger = found.ledger
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(ledger.dropped.items())) or "none"
        flying = sum(ledger.in_flight.values())
        yield "samples admitted", str(ledger.admitted)
        yield (
            "trained / dropped / dead letters / in flight at the end",
            (f"{ledger.trained} / {dropped} / {ledger.dead} / {flying}"),
        )
        yield "ends of an older attempt, ignored", str(ledger.late)
        yield "changes of owner", ", ".join(f"{n} {why}" for why, n in sorted(found.moved.items())) or "none"
        yield (
            "finished trajectories",
            (
                f"{found.completed} ({found.tokens} tokens), each equal to its script token for token;"
                f" {found.resumed} had more than one owner"
            ),
        )
    for what, n in sorted(campaign.missed.items()):
        yield f"{what}: target was not there" if "gave up" not in what else what, str(n)
    yield "Apache Kafka", KAFKA_VERSION
    yield "client", f"confluent-kafka {client_version()}, librdkafka {libversion()[0]}"
    yield "machine", f"{os.cpu_count()} cores, {platform.system()}, Python {sys.version.split()[0]}"


def _operator(target: str) -> str:
    return target.rpartition("-")[0] or target
