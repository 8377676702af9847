from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.operators.relay.chain import candidates, chain
from laminar.schemas.records import HeldVersion, RelayStatus
from tests.unit.operators.relay.test_relay_manifest import made

N_CHUNKS = 2


@st.composite
def heartbeats(draw: st.DrawFn) -> dict[str, RelayStatus]:
    names = draw(st.sets(st.sampled_from([f"relay-{i}" for i in range(8)]), min_size=1))
    found = {}
    for name in names:
        chunks = draw(st.integers(0, N_CHUNKS))
        held = (HeldVersion(version=1, epoch=0, chunks_verified=chunks, n_chunks=N_CHUNKS),)
        found[name] = RelayStatus(
            relay_id=name,
            boot_id=draw(st.sampled_from(["boot", "other"])),
            url="http://x:1",
            host=name,
            shm_dir="",
            zone=draw(st.sampled_from(["", "a", "b"])),
            versions=held if draw(st.booleans()) else (),
            at_ms=0,
        )
    return found


def whole(status: RelayStatus) -> bool:
    return any(v.chunks_verified == v.n_chunks for v in status.versions)


@given(heartbeats(), st.sampled_from([f"relay-{i}" for i in range(8)]))
def test_every_relay_is_in_the_chain_once_and_zones_are_not_torn(living: dict[str, RelayStatus], origin: str) -> None:
    order = chain(made(relay_id=origin), living)
    assert sorted(s.relay_id for s in order) == sorted(living)
    zones = [s.zone for s in order]
    entered = [zone for i, zone in enumerate(zones) if i == 0 or zones[i - 1] != zone]
    assert len(entered) == len(set(zones))


@given(heartbeats(), st.sampled_from([f"relay-{i}" for i in range(8)]))
def test_no_two_relays_wait_for_each_other(living: dict[str, RelayStatus], origin: str) -> None:
    manifest = made(relay_id=origin)
    waits = {me: [s for s in candidates(manifest, living, me=me) if not whole(s)] for me in living}
    for me, others in waits.items():
        assert me not in {s.relay_id for s in others}
        for other in others:
            assert me not in {s.relay_id for s in waits[other.relay_id]}


@given(heartbeats(), st.sampled_from([f"relay-{i}" for i in range(8)]))
def test_whoever_holds_the_whole_version_can_be_asked_by_all_others(
    living: dict[str, RelayStatus], origin: str
) -> None:
    holders = {name for name, status in living.items() if whole(status)}
    for me in living:
        found = {s.relay_id for s in candidates(made(relay_id=origin), living, me=me)}
        assert holders - {me} <= found
