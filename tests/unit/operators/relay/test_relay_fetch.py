"""Bringing a version near without waiting for it: what a rollout does that samples meanwhile."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from laminar.operators.relay import source as source_module
from laminar.operators.relay.source import RelaySource
from laminar.schemas.errors import LaminarError, WeightsMismatch
from laminar.schemas.records import HeldVersion, VersionManifest
from laminar.streams.deadline import Deadline
from tests.support.relays import RelayRun, arrays, far, soon, values_of


def expected(version: int) -> dict[str, set[float]]:
    return {name: {float(a[0])} for name, a in arrays(version).items()}


def opened(source: RelaySource, manifest: VersionManifest) -> dict[str, set[float]]:
    with source.open(manifest, Deadline.after(5, "test")) as tensors:
        return values_of(tensors)


def memories() -> int:
    """How many versions lie in memory of this process's own."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if "laminar-version" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(os.fstat(fd).st_ino)
    return len(found)


def fetched(source: RelaySource, newest: VersionManifest) -> VersionManifest:
    found: list[VersionManifest] = []

    def look() -> bool:
        at_hand = source.fetch(newest)
        found.extend([] if at_hand is None else [at_hand])
        return bool(found)

    soon(look, "weights at hand")
    return found[0]


def test_what_a_relay_of_this_machine_holds_is_at_hand_at_once(run: RelayRun) -> None:
    run.relay()
    source = run.source()
    manifest = run.publish(run.publisher(), 1)
    assert fetched(source, manifest) is manifest
    assert memories() == 0
    assert opened(source, manifest) == expected(1)


def test_c4_a_version_that_is_far_away_comes_while_nobody_waits_for_it(run: RelayRun) -> None:
    with far(run) as (proxy, publish, source):
        proxy.gate.clear()
        manifest = publish(1)
        for _ in range(20):
            assert source.fetch(manifest) is None
        proxy.gate.set()
        assert fetched(source, manifest) is manifest
        assert opened(source, manifest) == expected(1)
        assert memories() == 0


def test_d15_a_version_on_its_way_is_not_given_up_for_a_newer_one_which_follows(run: RelayRun) -> None:
    with far(run) as (proxy, publish, source):
        proxy.gate.clear()
        older = publish(1)
        assert source.fetch(older) is None
        newer = publish(2)
        assert source.fetch(newer) is None
        proxy.gate.set()
        assert fetched(source, newer) is older
        assert opened(source, older) == expected(1)
        assert fetched(source, newer) is newer
        assert opened(source, newer) == expected(2)


def test_a_pull_that_gets_nothing_says_so_and_the_next_call_begins_another(run: RelayRun) -> None:
    with far(run) as (proxy, publish, source):
        proxy.gate.clear()
        manifest = publish(1)
        with pytest.raises(LaminarError, match="version 1"):
            fetched(source, manifest)
        assert memories() == 0
        proxy.gate.set()
        time.sleep(0.6)  # until the peer is no longer passed over
        assert fetched(source, manifest) is manifest
        assert opened(source, manifest) == expected(1)


def test_what_has_come_is_let_go_when_another_version_is_opened_and_at_the_end(run: RelayRun) -> None:
    with far(run) as (_, publish, source):
        older, newer = publish(1), publish(2)
        assert fetched(source, older) is older
        assert memories() == 1
        assert opened(source, newer) == expected(2)
        assert memories() == 0
        assert fetched(source, newer) is newer
        source.close()
        assert memories() == 0


def test_a_pull_under_way_ends_when_its_source_is_closed(run: RelayRun) -> None:
    with far(run) as (proxy, publish, source):
        proxy.gate.clear()
        assert source.fetch(publish(1)) is None
        source.close()
        proxy.gate.set()
        soon(lambda: memories() == 0, "memory given back")


def test_a_version_that_is_only_prepared_is_refused(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 1)
    with pytest.raises(WeightsMismatch, match="only committed versions are applied"):
        run.source().fetch(replace(manifest, state="prepared"))


def test_a_version_that_grows_in_the_relay_of_this_machine_is_not_pulled_past_it(
    run: RelayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout of the machine would carry it over the network once more."""
    relay = run.relay(run=False)
    manifest = run.publish(run.publisher(), 1)
    later = replace(manifest, version=2, root_digest=manifest.root_digest)
    source = run.source()
    soon(lambda: source._directory.refresh(), "heartbeat")
    [status] = source._directory.refresh().values()
    now = 1000.0
    monkeypatch.setattr(source_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(source, "_now_ms", lambda: status.at_ms)
    for verified in (0, 1, 2, 3):
        held = HeldVersion(version=2, epoch=0, chunks_verified=verified, n_chunks=9)
        run.write(replace(status, versions=(held,)))
        for _ in range(2):
            now += 4.0
            assert source.fetch(later) is None
            assert source._arrival is None
    now += 4.0  # nothing more of it within the patience
    assert source.fetch(later) is None
    assert source._arrival is not None
    source._arrival.abandon()
    relay.step(time.time())
