from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from laminar.operators.relay.client import RelayClient
from laminar.operators.relay.manifest import n_chunks
from laminar.operators.relay.operator import RelayOperator
from laminar.operators.relay.pull import Pull, Quarantine, Superseded
from laminar.operators.relay.slot import slots
from laminar.schemas.errors import DeadlineExceeded, Unavailable, WeightsMismatch
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline
from tests.support.proxy import Proxy
from tests.support.relays import RelayRun, arrays, soon, values_of


def limit(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "test")


def expected(version: int) -> dict[str, set[float]]:
    return {name: {float(a[0])} for name, a in arrays(version).items()}


def status_of(run: RelayRun, relay: RelayOperator) -> RelayStatus:
    source = run.source()
    name = relay.server.relay_id
    soon(lambda: source._directory.refresh().get(name), "heartbeat")
    return source._directory.refresh()[name]


def pull_of(
    run: RelayRun, manifest: VersionManifest, peers: Callable[[], Sequence[RelayStatus]], **settings: object
) -> tuple[Pull, bytearray]:
    data = bytearray(manifest.total_bytes)
    values: dict[str, object] = {
        "manifest": manifest,
        "data": memoryview(data),
        "peers": peers,
        "token": run.source().token,
        "quarantine": Quarantine(),
        "read_timeout_s": 1.0,
        "stall_timeout_s": 0.3,
    }
    return Pull(**{**values, **settings}), data  # type: ignore[arg-type]


@contextmanager
def proxied(relay: RelayOperator, status: RelayStatus) -> Iterator[tuple[Proxy, RelayStatus]]:
    proxy = Proxy(int(relay.server.url.rsplit(":", 1)[1]))
    try:
        yield proxy, dataclasses.replace(status, url=proxy.url)
    finally:
        proxy.close()


def flip(relay: RelayOperator, manifest: VersionManifest, at: int) -> None:
    """Damage a byte in the slot of a sealed version."""
    for slot in slots(relay.store.folder):
        note = slot.note()
        if note and note.version == manifest.version:
            with slot.data.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def test_d16_a_byte_flipped_on_the_wire_is_fetched_again(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    with proxied(relay, status_of(run, relay)) as (proxy, status):
        seen = [0]

        def damage_once(piece: bytes) -> bytes:
            seen[0] += len(piece)
            if len(piece) > 2000 and seen[0] > 30000 and seen[0] < 1 << 30:
                seen[0] = 1 << 40
                return piece[:1000] + bytes([piece[1000] ^ 1]) + piece[1001:]
            return piece

        proxy.change = damage_once
        quarantine = Quarantine()
        pull, data = pull_of(run, manifest, lambda: [status], quarantine=quarantine)
        pull.run(limit())
        assert seen[0] >= 1 << 40
        assert not quarantine.holds(status)
    with run.source().open(manifest, limit()) as tensors:
        entry = manifest.tensors[2]
        assert data[entry.offset : entry.offset + entry.size] == bytes(tensors[entry.name].data)


def test_d16_a_peer_with_a_damaged_slot_is_quarantined_after_three_and_another_is_asked(run: RelayRun) -> None:
    bad, good = run.relay(0), run.relay(1)
    manifest = run.publish(run.publisher(), 1)
    soon(lambda: good.store.has(manifest), "the second relay holds version 1")
    flip(bad, manifest, 50000)
    quarantine = Quarantine()
    bad_status, good_status = status_of(run, bad), status_of(run, good)
    asked = []

    def peers() -> list[RelayStatus]:
        asked.append(1)
        return [bad_status, good_status]

    pull, data = pull_of(run, manifest, peers, quarantine=quarantine)
    pull.run(limit())
    assert len(asked) == 4
    assert quarantine.holds(bad_status)
    assert not quarantine.holds(good_status)
    assert data[50000:50004] == memoryview(arrays(1)["layer.2.weight"]).cast("B")[:4]
    # a restart gives it another chance
    assert not quarantine.holds(dataclasses.replace(bad_status, boot_id="another"))


def test_d16_when_every_peer_is_quarantined_the_version_is_refused(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    flip(relay, manifest, 0)
    with (
        pytest.raises(WeightsMismatch, match=r"every relay that offers it is quarantined \(relay-0\)"),
        run.source(map_local=False).open(manifest, limit()),
    ):
        pass


def test_d13_a_relay_restarted_on_the_same_address_is_noticed_by_its_boot_id(run: RelayRun) -> None:
    first = run.relay(0)
    publisher = run.publisher()
    manifest = run.publish(publisher, 1)
    stale = status_of(run, first)
    port = int(stale.url.rsplit(":", 1)[1])
    run.stop(first, drain=True)
    second = run.relay(0, port=port)
    assert second.server.url == stale.url

    client = RelayClient("relay-0", stale.url, run.source().token, boot_id=stale.boot_id)
    with pytest.raises(Unavailable, match=f"this is boot {second.boot_id}, not {stale.boot_id}"):
        client.read_range(manifest.root_digest, 0, 10, wait_s=0, deadline=limit())
    client.close()


def test_d13_a_pull_that_sees_a_restart_goes_on_and_mixes_nothing(run: RelayRun) -> None:
    first, other = run.relay(0, chunk_bytes=65536), run.relay(1)
    manifest = run.publish(run.publisher(), 1, n=8, size=1_000_000)  # more than sockets buffer
    soon(lambda: other.store.has(manifest), "the second relay holds version 1")
    stale, good = status_of(run, first), status_of(run, other)
    port = int(stale.url.rsplit(":", 1)[1])
    restarted: list[RelayOperator] = []
    progress: list[int] = []

    def restart_after_five(have: int) -> None:
        progress.append(have)
        if have == 5:
            run.stop(first, drain=True)
            restarted.append(run.relay(0, port=port))
            run.publish(run.publisher(), 2, n=8, size=1_000_000)

    asked: list[int] = []

    def peers() -> list[RelayStatus]:
        asked.append(pull.have)
        return [stale, good]

    pull, data = pull_of(run, manifest, peers, on_chunk=restart_after_five)
    pull.run(limit())
    assert restarted
    assert len(asked) == 2, "the relay that restarted, then the other one"
    assert 5 <= asked[1] < n_chunks(manifest)
    assert progress == list(range(1, n_chunks(manifest) + 1)), "no chunk twice, none left out"
    for entry in manifest.tensors:
        wanted = arrays(1, n=8, size=1_000_000)[entry.name].tobytes()
        assert data[entry.offset : entry.offset + entry.size] == wanted


def test_a_pull_resumes_at_the_first_missing_chunk_when_its_peer_dies(run: RelayRun) -> None:
    first, other = run.relay(0), run.relay(1)
    manifest = run.publish(run.publisher(), 1)
    soon(lambda: other.store.has(manifest), "the second relay holds version 1")
    with proxied(first, status_of(run, first)) as (proxy, through):
        good = status_of(run, other)
        progress: list[int] = []
        cut = [60000]

        def die(piece: bytes) -> bytes:
            cut[0] -= len(piece)
            if cut[0] < 0:
                raise OSError("cut")
            return piece

        proxy.change = die
        pull, _ = pull_of(run, manifest, lambda: [through, good], on_chunk=progress.append)
        pull.run(limit())
    assert cut[0] < 0
    assert progress == list(range(1, n_chunks(manifest) + 1))


def test_a_peer_that_stalls_is_passed_over(run: RelayRun) -> None:
    first, other = run.relay(0), run.relay(1)
    manifest = run.publish(run.publisher(), 1)
    soon(lambda: other.store.has(manifest), "the second relay holds version 1")
    with proxied(first, status_of(run, first)) as (proxy, through):
        proxy.gate.clear()
        good = status_of(run, other)
        pull, _ = pull_of(run, manifest, lambda: [through, good], read_timeout_s=0.2)
        pull.run(limit())
    assert pull.have == n_chunks(manifest)


def test_a_pull_nobody_answers_ends_at_its_deadline_and_says_why(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    status = status_of(run, relay)
    run.stop(relay)
    pull, _ = pull_of(run, manifest, lambda: [status])
    with pytest.raises(DeadlineExceeded, match=r"version 1 \(epoch 0\): relay relay-0 .*refused"):
        pull.run(limit(0.3))


def test_d15_a_superseded_pull_is_abandoned_at_a_chunk_boundary(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    status = status_of(run, relay)
    wanted = [True]

    def lose_interest(have: int) -> None:
        wanted[0] = have < 7

    pull, _ = pull_of(run, manifest, lambda: [status], on_chunk=lose_interest, wanted=lambda: wanted[0])
    with pytest.raises(Superseded, match="abandoned at chunk 7 of 20"):
        pull.run(limit())


def test_d15_a_superseded_pull_that_is_nearly_done_is_finished(run: RelayRun) -> None:
    relay = run.relay()
    manifest = run.publish(run.publisher(), 1)
    status = status_of(run, relay)
    wanted = [True]

    def lose_interest(have: int) -> None:
        wanted[0] = have < 16

    pull, _ = pull_of(run, manifest, lambda: [status], on_chunk=lose_interest, wanted=lambda: wanted[0])
    pull.run(limit())
    assert pull.have == 20


def test_d15_a_relay_that_fell_behind_takes_the_newest_version_and_no_backlog(run: RelayRun) -> None:
    origin = run.relay(0, run=False, dead_after_s=60)
    real = status_of(run, origin)
    with proxied(origin, real) as (proxy, through):
        gate = threading.Event()

        def hold_data(piece: bytes) -> bytes:
            if not piece.startswith((b"HTTP/1.1 200", b"{")):
                gate.wait(20)
            return piece

        proxy.change = hold_data
        run.write(dataclasses.replace(through, at_ms=int(time.time() * 1000)))
        publisher = run.publisher()
        manifests = [run.publish(publisher, 1)]
        behind = run.relay(1, dead_after_s=60, read_timeout_s=20, stall_timeout_s=20)
        seen: set[int] = set()
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                seen.update(h.version for h in behind.store.held() if h.chunks_verified)
                time.sleep(0.001)

        soon(lambda: [h.version for h in behind.store.held()] == [1], "the pull of version 1 has begun")
        manifests += [run.publish(publisher, version) for version in (2, 3, 4)]
        soon(lambda: behind._newest is not None and behind._newest.version == 4, "the newest is known")
        watcher = threading.Thread(target=watch)
        watcher.start()
        gate.set()
        soon(lambda: behind.store.has(manifests[3]), "the newest version is here")
        stop.set()
        watcher.join()
        assert not seen & {2, 3}
        assert not any(behind.store.has(m) for m in manifests[1:3])
        run.stop(behind, drain=True)


def test_a_chain_passes_chunks_on_before_it_has_them_all(run: RelayRun) -> None:
    origin = run.relay(0)
    relay = run.relay(1, run=False)
    middle = status_of(run, relay)
    manifest = run.publish(run.publisher(), 1)
    status = status_of(run, origin)
    fill = relay.store.begin(manifest)
    first, _ = pull_of(run, manifest, lambda: [status], data=fill.data, on_chunk=fill.verified)
    halfway = threading.Event()
    go_on = threading.Event()

    def pause(have: int) -> None:
        fill.verified(have)
        if have == 10:
            halfway.set()
            assert go_on.wait(20)

    first.on_chunk = pause
    thread = threading.Thread(target=first.run, args=(limit(),))
    thread.start()
    assert halfway.wait(20)
    progress: list[int] = []
    second, _ = pull_of(run, manifest, lambda: [middle], on_chunk=progress.append, stall_timeout_s=20)
    follower = threading.Thread(target=second.run, args=(limit(),))
    follower.start()
    soon(lambda: progress and progress[-1] == 10, "ten chunks came through while the eleventh is not there")
    go_on.set()
    thread.join()
    follower.join()
    fill.close()
    assert relay.store.has(manifest)
    assert len(progress) == 20
    with run.source().open(manifest, limit()) as tensors:
        assert values_of(tensors) == expected(1)
