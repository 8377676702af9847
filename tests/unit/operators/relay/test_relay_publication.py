from __future__ import annotations

from tests.support.relays import RelayRun, arrays, values_of

from laminar.streams.deadline import Deadline


def soon_deadline() -> Deadline:
    return Deadline.after(20, "test")


def test_what_was_published_is_what_a_rollout_maps(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 3)
    with run.source().open(manifest, soon_deadline()) as tensors:
        assert values_of(tensors) == {name: {float(a[0])} for name, a in arrays(3).items()}
        assert tensors["layer.0.weight"].shape == (5000,)


def test_a_rollout_elsewhere_pulls_over_http(run: RelayRun) -> None:
    run.relay()
    manifest = run.publish(run.publisher(), 3)
    with run.source(map_local=False).open(manifest, soon_deadline()) as tensors:
        assert values_of(tensors) == {name: {float(a[0])} for name, a in arrays(3).items()}
