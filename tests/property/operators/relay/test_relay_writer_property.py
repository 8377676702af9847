from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.operators.relay.manifest import check, chunk_ok, chunk_range, n_chunks, root_digest, tensor_views
from laminar.operators.relay.slot import Mappings, allocate, lease
from laminar.operators.relay.writer import SlotWriter
from laminar.operators.weights import NamedTensor
from laminar.streams.deadline import Deadline
from tests.unit.operators.relay.test_relay_manifest import made


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(1, 1500), st.integers(1, 20000))
def test_what_is_written_is_what_the_manifest_describes(sizes: list[int], chunk_bytes: int, reserved: int) -> None:
    contents = [bytes((7 * i + j) % 251 for j in range(size)) for i, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        path = Path(folder) / "slot-000"
        allocate(path, reserved)
        path.write_bytes(b"\xff" * reserved)  # a recycled slot: old bytes everywhere
        mappings = Mappings()
        writer = SlotWriter(path, mappings, chunk_bytes=chunk_bytes, pool=pool, deadline=Deadline.after(20, "write"))
        for i, content in enumerate(contents):
            writer.add(NamedTensor(name=str(i), dtype="U8", shape=(len(content),), data=memoryview(content)))
        digests = writer.finish()
        writer.close()
        mappings.close()
        if not writer.total_bytes:
            return
        manifest = made(
            tensors=tuple(writer.tensors),
            total_bytes=writer.total_bytes,
            chunk_bytes=chunk_bytes,
            chunk_digests=digests,
            root_digest=root_digest(digests),
            tied={},
        )
        check(manifest)
        with lease(path) as held, held.map(manifest.total_bytes) as mapped, memoryview(mapped) as data:
            for index in range(n_chunks(manifest)):
                start, stop = chunk_range(manifest, index)
                with data[start:stop] as chunk:
                    assert chunk_ok(manifest, index, chunk)
            views = tensor_views(manifest, data)
            assert [bytes(view.data) for view in views.values()] == contents
            for view in views.values():
                view.data.release()
