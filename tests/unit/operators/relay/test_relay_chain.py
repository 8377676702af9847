from __future__ import annotations

from laminar.operators.relay.chain import alive, candidates, chain
from laminar.schemas.records import HeldVersion, RelayStatus, VersionManifest
from tests.unit.operators.relay.test_relay_manifest import made


def status(name: str, *, zone: str = "", chunks: int = 0, boot: str = "boot", at_ms: int = 0) -> RelayStatus:
    held = (HeldVersion(version=1, epoch=0, chunks_verified=chunks, n_chunks=2),) if chunks else ()
    return RelayStatus(
        relay_id=name,
        boot_id=boot,
        url=f"http://{name}:1",
        host=name,
        shm_dir="/nowhere",
        zone=zone,
        versions=held,
        at_ms=at_ms,
    )


def named(*relays: RelayStatus) -> dict[str, RelayStatus]:
    return {r.relay_id: r for r in relays}


def manifest(origin: str = "relay-1") -> VersionManifest:
    return made(relay_id=origin)


def ids(relays: list[RelayStatus]) -> list[str]:
    return [r.relay_id for r in relays]


def test_each_relay_pulls_from_the_one_before_it() -> None:
    relays = named(status("relay-0"), status("relay-1", chunks=2), status("relay-2"))
    assert ids(chain(manifest(), relays)) == ["relay-1", "relay-0", "relay-2"]
    assert ids(candidates(manifest(), relays, me="relay-1")) == []
    assert ids(candidates(manifest(), relays, me="relay-0")) == ["relay-1"]
    assert ids(candidates(manifest(), relays, me="relay-2")) == ["relay-0", "relay-1"]


def test_a_dead_predecessor_is_skipped() -> None:
    relays = named(status("relay-0", at_ms=0), status("relay-1", chunks=2, at_ms=900), status("relay-2", at_ms=950))
    living = alive(relays, now_ms=1000, dead_after_ms=500)
    assert ids(candidates(manifest(), living, me="relay-2")) == ["relay-1"]


def test_a_version_enters_a_zone_once() -> None:
    relays = named(
        status("relay-0", zone="b"),
        status("relay-1", zone="a", chunks=2),
        status("relay-2", zone="b"),
        status("relay-3", zone="a"),
    )
    assert ids(chain(manifest(), relays)) == ["relay-1", "relay-3", "relay-0", "relay-2"]


def test_when_the_origin_is_dead_the_relay_with_most_of_it_leads() -> None:
    relays = named(status("relay-0"), status("relay-2", chunks=1), status("relay-3", chunks=2))
    assert ids(chain(manifest(), relays)) == ["relay-3", "relay-0", "relay-2"]


def test_an_origin_that_restarted_empty_pulls_from_one_that_has_it() -> None:
    relays = named(status("relay-0", chunks=2), status("relay-1", boot="another"))
    assert ids(candidates(manifest(), relays, me="relay-1")) == ["relay-0"]


def test_whole_copies_behind_me_are_the_last_resort() -> None:
    relays = named(status("relay-0"), status("relay-1", chunks=2), status("relay-2", chunks=2), status("relay-3"))
    assert ids(candidates(manifest(), relays, me="relay-0")) == ["relay-1", "relay-2"]


def test_a_rollout_prefers_whole_copies_in_its_zone() -> None:
    relays = named(
        status("relay-0", zone="b"), status("relay-1", zone="a", chunks=2), status("relay-2", zone="b", chunks=2)
    )
    assert ids(candidates(manifest(), relays, me="", zone="b")) == ["relay-2", "relay-1", "relay-0"]


def test_no_relay_is_nobody() -> None:
    assert chain(manifest(), {}) == []
    assert candidates(manifest(), {}, me="relay-0") == []
