from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from laminar.operators.relay.slot import slots
from laminar.operators.weights import NamedTensor
from laminar.schemas.errors import ConfigError, DeadlineExceeded, Fenced, Unavailable, WeightsMismatch
from laminar.streams.deadline import Deadline
from tests.support.relays import RelayRun, arrays, named, soon, values_of


def limit(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "test")


def expected(version: int, n: int = 4) -> dict[str, set[float]]:
    return {name: {float(a[0])} for name, a in arrays(version, n=n).items()}


@pytest.mark.parametrize("map_local", [True, False])
def test_another_process_maps_the_same_bytes_by_the_path_of_each_tensor(run: RelayRun, map_local: bool) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 3)
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "at, size = int(sys.argv[2]), int(sys.argv[3])\n"
        "sys.stdout.buffer.write(data[at : at + size])\n"
    )
    with run.source(map_local=map_local).open(manifest, limit()) as tensors:
        for view in list(tensors.values())[-2:]:
            asked = [sys.executable, "-c", code, view.path, str(view.offset), str(view.data.nbytes)]
            assert subprocess.run(asked, capture_output=True, check=True).stdout == bytes(view.data)


def test_what_was_published_is_what_a_rollout_maps(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 3)
    with run.source().open(manifest, limit()) as tensors:
        assert values_of(tensors) == expected(3)
        assert tensors["layer.0.weight"].shape == (5000,)
        assert tensors["layer.0.weight"].dtype == "F32"


def test_a_rollout_elsewhere_pulls_over_http(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 3)
    with run.source(map_local=False).open(manifest, limit()) as tensors:
        assert values_of(tensors) == expected(3)


def test_a_generator_of_unknown_size_grows_the_slot(run: RelayRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.operators.relay.publisher._FIRST_BYTES", 4096)
    run.relay()
    publisher = run.publisher()

    def one_by_one() -> Iterator[NamedTensor]:
        yield from named(arrays(1, n=9))

    prepared = publisher.stage(one_by_one(), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    manifest = publisher.seal(prepared, limit())
    with run.source().open(manifest, limit()) as tensors:
        assert values_of(tensors) == expected(1, n=9)


def test_odd_shapes_arrive_aligned(run: RelayRun) -> None:
    run.relay()
    given = {
        "scalar": np.float32(1.5).reshape(()),
        "empty": np.zeros((0, 3), np.float32),
        "odd": np.arange(7, dtype=np.uint8),
        "wide": np.arange(6, dtype=np.float32).reshape(2, 3),
    }
    tensors = [
        NamedTensor(name=n, dtype="U8" if a.dtype == np.uint8 else "F32", shape=a.shape, data=memoryview(a))
        for n, a in given.items()
    ]
    publisher = run.publisher()
    prepared = publisher.stage(tensors, tied={"t": "odd"}, epoch=0, version=0, parent=-1, step=0, deadline=limit())
    manifest = publisher.seal(prepared, limit())
    assert all(entry.offset % 256 == 0 for entry in manifest.tensors)
    assert manifest.tied == {"t": "odd"}
    with run.source().open(manifest, limit()) as views:
        for name, array in given.items():
            assert bytes(views[name].data) == array.tobytes()
            assert views[name].shape == array.shape


def test_nobody_reads_before_seal(run: RelayRun) -> None:
    relay = run.relay()
    publisher = run.publisher()
    prepared = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    with pytest.raises(WeightsMismatch, match="prepared"), run.source().open(prepared, limit()):
        pass
    assert relay.store.held() == ()
    assert relay.store.progress(prepared.root_digest, above=-1, wait_s=0) is None
    assert [slot.note().state for slot in slots(relay.store.folder) if slot.note()] == ["staged"]  # type: ignore[union-attr]


def test_a_reader_cannot_change_the_slot(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 1)
    source = run.source()
    with source.open(manifest, limit()) as tensors:
        tensors["layer.0.weight"].data[:] = bytes(20000)
    with source.open(manifest, limit()) as tensors:
        assert values_of(tensors) == expected(1)


def test_tensors_stay_valid_while_something_refers_to_them(run: RelayRun) -> None:
    run.relay(keep_versions=1)
    publisher, source = run.publisher(), run.source()
    with source.open(run.publish(publisher, 1), limit()) as tensors:
        kept = np.frombuffer(tensors["layer.1.weight"].data, np.float32)
    for version in range(2, 6):
        run.publish(publisher, version)
    assert set(kept.tolist()) == {1001.0}


def test_d5_a_slow_reader_finishes_its_version_across_five_publications(run: RelayRun) -> None:
    relay = run.relay(keep_versions=1)
    publisher, slow, quick = run.publisher(), run.source(), run.source()
    first = run.publish(publisher, 1)
    with slow.open(first, limit()) as old:
        for version in range(2, 7):
            with quick.open(run.publish(publisher, version), limit()) as new:
                assert values_of(new) == expected(version)
        assert values_of(old) == expected(1)
    assert [held.version for held in relay.store.held()] == [6]
    # the version is gone for good: a late reader is told so, and can move on to the newest
    with pytest.raises(DeadlineExceeded, match="version 1"), slow.open(first, limit(0.3)):
        pass


def test_a8_publication_never_waits_for_readers(run: RelayRun) -> None:
    run.relay(keep_versions=2)
    publisher = run.publisher()
    opened = []
    for version in range(6):
        context = run.source().open(run.publish(publisher, version), limit())
        opened.append((context, context.__enter__()))
    for version, (context, tensors) in enumerate(opened):
        assert values_of(tensors) == expected(version)
        context.__exit__(None, None, None)


def test_d10_a_hundred_publications_leave_the_memory_flat(run: RelayRun) -> None:
    relay = run.relay(keep_versions=2)
    publisher, source = run.publisher(), run.source()

    def used() -> int:
        return sum(f.stat().st_blocks * 512 for f in relay.store.folder.iterdir() if not f.suffix)

    after_few = 0
    threads = 0
    for version in range(100):
        manifest = run.publish(publisher, version)
        with source.open(manifest, limit()) as tensors:
            assert tensors["layer.0.weight"].data[:4] == np.float32(version * 1000).tobytes()
        if version == 5:
            after_few, threads = used(), threading.active_count()
    assert used() == after_few
    assert threading.active_count() <= threads + 10  # connections that are just ending
    assert len(slots(relay.store.folder)) == 3
    assert len(list(Path("/proc/self/fd").iterdir())) < 100


def test_d10_too_little_shared_memory_is_refused_with_both_numbers(run: RelayRun) -> None:
    relay = run.relay()
    too_much = 1 << 50
    before = set(relay.store.folder.iterdir())
    with pytest.raises(ConfigError, match=rf"needs {too_much} bytes, \S+ has \d+ free"):
        relay.store.reserve(epoch=0, version=0, total_bytes=too_much)
    assert set(relay.store.folder.iterdir()) == before


def test_d11_a_publication_identical_to_the_last_says_so(run: RelayRun) -> None:
    run.relay()
    publisher = run.publisher()
    run.publish(publisher, 1)
    again = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=2, parent=1, step=2, deadline=limit())
    assert again.meta == {"identical_to": "1"}


def test_d11_a_tied_name_without_its_tensor_is_refused(run: RelayRun) -> None:
    run.relay()
    with pytest.raises(WeightsMismatch, match="'head' is tied to 'nothing'"):
        run.publisher().stage(
            named(arrays(1)), tied={"head": "nothing"}, epoch=0, version=2, parent=1, step=2, deadline=limit()
        )


def test_a_trainer_of_an_older_epoch_is_fenced(run: RelayRun) -> None:
    run.relay()
    old, new = run.publisher(), run.publisher()
    staged = old.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    run.publish(new, 2, epoch=1)
    with pytest.raises(Fenced, match="epoch 0 is over"):
        old.seal(staged, limit())
    with pytest.raises(Fenced, match="epoch 1 publishes"):
        run.publish(old, 3, epoch=0)


def test_seal_twice_does_no_harm_and_a_changed_slot_is_refused(run: RelayRun) -> None:
    relay = run.relay()
    reservation = relay.store.reserve(epoch=0, version=1, total_bytes=20000)
    publisher = run.publisher()
    prepared = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    staged = publisher._staged[0, 1]
    relay.store.seal(staged.slot, staged.nonce, prepared)
    relay.store.seal(staged.slot, staged.nonce, prepared)
    with pytest.raises(Unavailable, match="stage it again"):
        relay.store.seal(reservation.index, "another nonce", prepared)


def test_d16_a_byte_flipped_between_copy_and_seal_is_found(run: RelayRun) -> None:
    relay = run.relay()
    publisher = run.publisher()
    prepared = publisher.stage(named(arrays(1)), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    with slots(relay.store.folder)[0].data.open("r+b") as file:
        file.seek(9000)
        file.write(b"!")
    with pytest.raises(WeightsMismatch, match="1 of 20 chunks"):
        publisher.seal(prepared, limit())
    assert relay.store.held() == ()


def test_a11_publishing_to_a_dead_relay_ends_in_time_and_names_it(run: RelayRun) -> None:
    relay = run.relay()
    publisher = run.publisher()
    run.publish(publisher, 1)
    run.stop(relay)
    with pytest.raises(DeadlineExceeded, match=r"stage version 2: not within 0\.3 s \(relay relay-0 \(http:"):
        publisher.stage(
            named(arrays(2)),
            tied={},
            epoch=0,
            version=2,
            parent=1,
            step=2,
            deadline=Deadline.after(0.3, "stage version 2"),
        )


def test_a11_without_any_relay_the_message_says_so(run: RelayRun) -> None:
    with pytest.raises(DeadlineExceeded, match="no relay on this machine"):
        run.publisher().stage(named(arrays(2)), tied={}, epoch=0, version=2, parent=1, step=2, deadline=limit(0.2))


def test_an_error_in_the_tensors_gives_the_slot_back(run: RelayRun) -> None:
    relay = run.relay()
    publisher = run.publisher()

    def broken() -> Iterator[NamedTensor]:
        yield named(arrays(1))[0]
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        publisher.stage(broken(), tied={}, epoch=0, version=1, parent=0, step=1, deadline=limit())
    run.publish(publisher, 2)
    soon(lambda: [h.version for h in relay.store.held()] == [2], "the next version is held")
    assert len(slots(relay.store.folder)) == 1
