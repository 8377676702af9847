from __future__ import annotations

import dataclasses
import json
import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.operators.relay.folder import claim, remove, remove_stale, slot_folder
from laminar.operators.relay.slot import allocate, lease, leased, slots
from laminar.operators.relay.space import check_space, model_bytes
from laminar.operators.relay.token import run_token
from laminar.schemas.errors import ConfigError
from laminar.schemas.records import HeldVersion
from laminar.streams.deadline import Deadline
from tests.support.relays import RelayRun, arrays, named, soon, values_of


def limit(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "test")


def expected(version: int) -> dict[str, set[float]]:
    return {name: {float(a[0])} for name, a in arrays(version).items()}


def test_a_restarted_relay_adopts_its_sealed_slots_under_a_new_boot_id(run: RelayRun) -> None:
    first = run.relay()
    publisher = run.publisher()
    manifests = [run.publish(publisher, version) for version in (1, 2)]
    source = run.source()
    run.stop(first)
    with source.open(manifests[1], limit()) as tensors:  # the relay is down; the files are the truth
        assert values_of(tensors) == expected(2)
    second = run.relay()
    assert second.boot_id != first.boot_id
    soon(lambda: all(second.store.has(m) for m in manifests), "both versions are adopted")
    with run.source(map_local=False).open(manifests[0], limit()) as tensors:
        assert values_of(tensors) == expected(1)


def test_d16_a_slot_damaged_while_the_relay_was_down_is_not_adopted(run: RelayRun) -> None:
    first = run.relay()
    publisher = run.publisher()
    manifests = [run.publish(publisher, version) for version in (1, 2)]
    run.stop(first)
    damaged = next(s for s in slots(first.store.folder) if (note := s.note()) and note.version == 1)
    with damaged.data.open("r+b") as file:
        file.write(b"?")
    second = run.relay()
    soon(lambda: second.store.has(manifests[1]), "version 2 is adopted")
    soon(lambda: damaged.note() is None, "version 1 is dropped")
    assert [h.version for h in second.store.held()] == [2]


def test_slots_of_a_run_whose_folder_was_made_anew_are_not_adopted(tmp_path: Path, run: RelayRun) -> None:
    first = run.relay()
    run.publish(run.publisher(), 7, epoch=5)
    run.stop(first)
    anew = RelayRun(tmp_path, run.shm)
    try:
        second = anew.relay()
        assert second.store.folder == first.store.folder
        manifest = anew.publish(anew.publisher(), 0, epoch=0)
        soon(
            lambda: second.store.held() == (HeldVersion(version=0, epoch=0, chunks_verified=20, n_chunks=20),),
            "only the new run's version is held",
        )
        with anew.source().open(manifest, limit()) as tensors:
            assert values_of(tensors) == expected(0)
    finally:
        anew.close()


def test_a_relay_that_restarts_between_stage_and_seal_seals_what_was_staged(run: RelayRun) -> None:
    first = run.relay()
    publisher = run.publisher()
    prepared = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    run.stop(first)
    second = run.relay()
    committed = publisher.seal(prepared, limit())
    assert committed.state == "committed"
    assert committed.relay_boot == second.boot_id
    assert committed.relay_url == second.server.url
    with run.source().open(committed, limit()) as tensors:
        assert values_of(tensors) == expected(1)


def test_draining_waits_for_a_publication_under_way_then_removes_the_slots(run: RelayRun) -> None:
    relay = run.relay(run=False)
    publisher = run.publisher()
    prepared = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    assert not relay.drain(time.time())
    manifest = publisher.seal(prepared, limit())
    with run.source().open(manifest, limit()) as tensors:
        assert relay.drain(time.time())
        run.stop(relay)
        assert not relay.store.folder.exists()
        assert values_of(tensors) == expected(1)


def test_a_new_relay_pulls_the_newest_version_and_announces_it(run: RelayRun) -> None:
    run.relay(0)
    publisher = run.publisher()
    for version in (1, 2):
        manifest = run.publish(publisher, version)
    late = run.relay(1)
    soon(lambda: late.store.has(manifest), "version 2 arrives")
    assert [h.version for h in late.store.held()] == [2]
    source = run.source()
    soon(
        lambda: (status := source._directory.refresh().get("relay-1")) and [v.version for v in status.versions] == [2],
        "the heartbeat says so",
    )


def test_a_relay_that_lost_its_memory_refills_from_the_others(run: RelayRun) -> None:
    origin, other = run.relay(0), run.relay(1)
    manifest = run.publish(run.publisher(), 1)
    soon(lambda: other.store.has(manifest), "the other relay has it")
    run.stop(origin, drain=True)
    again = run.relay(0)
    soon(lambda: again.store.has(manifest), "it has it again")


def test_one_folder_has_one_relay(run: RelayRun) -> None:
    run.relay()
    with pytest.raises(ConfigError, match=rf"another relay uses it \(process {os.getpid()}\)"):
        run.relay()


def test_remove_only_ever_removes_a_relays_folder(tmp_path: Path, run: RelayRun) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    remove(precious)
    remove(tmp_path / "missing")
    assert (precious / "file").exists()
    relay = run.relay()
    run.stop(relay)
    assert relay.store.folder == slot_folder(run.config(), run.context("relay-0").run, "relay-0")
    remove(relay.store.folder)
    assert not relay.store.folder.exists()


_DEAD_RUN = """
import os, sys
from pathlib import Path
from laminar.operators.relay.folder import claim
from laminar.operators.relay.slot import allocate
folder = Path(sys.argv[1])
if os.fork() == 0:  # the relay, whose supervisor is the process above
    claim(folder, boot_id="b", run_dir=folder)
    allocate(folder / "slot-000", 4096)
    os.write(1, b"ready")
    os.close(1)
    os.read(0, 1)  # until killed
    os._exit(0)
os.wait()
"""


def test_d10_what_a_killed_run_left_is_removed_by_the_next_relay_on_the_machine(run: RelayRun) -> None:
    folder = run.shm / "laminar-dead-relay-0-x"
    with subprocess.Popen(
        [sys.executable, "-c", _DEAD_RUN, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.read(5) == b"ready"
        owner = json.loads((folder / "owner.json").read_bytes())

        def stale() -> list[Path]:
            return remove_stale(run.shm, keep=run.shm / "mine", stale_after_s=1e9, now=time.time())

        assert stale() == []  # it lives
        os.kill(owner["pid"], 9)
        soon(lambda: not leased(folder / "owner.lock"), "the relay is dead")
        supervisor.kill()
        supervisor.wait()
        with lease(folder / "slot-000"):
            assert stale() == []  # a rollout still reads
        relay = run.relay()
        assert not folder.exists()
        assert relay.store.folder.exists()


def test_a_crashed_relays_folder_stays_while_its_supervisor_lives(run: RelayRun) -> None:
    folder = run.shm / "laminar-crashed-relay-0-x"
    claim(folder, boot_id="b", run_dir=folder).release(and_remove=False)
    assert remove_stale(run.shm, keep=run.shm / "mine", stale_after_s=0, now=time.time() + 10) == []


def test_a_lease_vanishes_with_its_process(run: RelayRun) -> None:
    path = run.shm / "slot-000"
    allocate(path, 4096)
    code = (
        "import sys; from pathlib import Path; from laminar.operators.relay.slot import lease\n"
        "held = lease(Path(sys.argv[1])); mapped = held.map(4096); held.close(); print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        assert leased(path)
        reader.kill()
        reader.wait()
        assert not leased(path)


def test_shared_memory_too_small_for_the_model_is_refused_at_start(run: RelayRun, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 0]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert model_bytes(folder, "bfloat16") == 2 << 40
    with pytest.raises(
        ConfigError, match=rf"4 slots for the {4 << 40} bytes of \S+ need {16 << 40} bytes, \S+ has \d+"
    ):
        run.relay()
    assert not list(run.shm.iterdir())


def test_a_model_without_safetensors_is_somebody_elses_error(run: RelayRun, tmp_path: Path) -> None:
    info = run.context("relay-0").run
    check_space(run.config(), info, run.shm)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"garbage")
    check_space(run.config(), info, run.shm)


def test_the_token_is_private_and_the_same_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMINAR_RELAY_TOKEN", raising=False)
    code = "import sys; from pathlib import Path; from laminar.operators.relay.token import run_token\n"
    code += "print(run_token(Path(sys.argv[1])))"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    tokens = {child.communicate()[0].strip() for child in children}
    assert tokens == {run_token(tmp_path / "run")}
    assert len(tokens.pop()) == 64
    assert stat.S_IMODE((tmp_path / "run" / "relay.token").stat().st_mode) == 0o600
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["relay.token"]
    monkeypatch.setenv("LAMINAR_RELAY_TOKEN", "given")
    assert run_token(tmp_path / "run") == "given"


def test_a_manifest_of_an_older_epoch_is_void(run: RelayRun) -> None:
    relay = run.relay()
    publisher = run.publisher()
    old = run.publish(publisher, 9, epoch=0)
    new = run.publish(publisher, 10, epoch=1)
    soon(lambda: relay._newest == new, "the new epoch is seen")
    run.write(dataclasses.replace(old, version=11))
    run.publish(publisher, 11, epoch=1)
    soon(lambda: relay._newest is not None and relay._newest.version == 11, "the newest is seen")
    assert relay._newest is not None
    assert relay._newest.epoch == 1


def test_d10_when_memory_is_scarce_old_versions_go_first_and_never_the_newest(run: RelayRun) -> None:
    small = run.shm / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small memory file system")
    try:
        relay = run.relay(shm_root=small, keep_versions=3)  # three slots of 80 KB fit, four do not
        publisher, source = run.publisher(), run.source()
        for version in range(5):
            with source.open(run.publish(publisher, version), limit()) as tensors:
                assert values_of(tensors) == expected(version)
        assert [h.version for h in relay.store.held()][-1] == 4
        assert len(relay.store.held()) >= 2
        with pytest.raises(ConfigError, match=r"shared memory too small: .* needs 400384 bytes"):
            run.publish(publisher, 5, size=25000)
        assert [h.version for h in relay.store.held()] == [4]
        run.stop(relay, drain=True)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
