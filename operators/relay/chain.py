"""The order in which a version travels from relay to relay. Pure: heartbeats in, names out.

All relays see the same heartbeats, so each computes the same chain and only has to find itself in it: the relay that
the trainer wrote to, then its zone, then zone by zone, by id. Each pulls from the nearest living one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from laminar.schemas.records import RelayStatus, VersionManifest

__all__ = ["alive", "candidates", "chain"]


def alive(relays: Mapping[str, RelayStatus], *, now_ms: int, dead_after_ms: int) -> dict[str, RelayStatus]:
    """Relays whose newest heartbeat is young enough."""
    return {name: status for name, status in relays.items() if now_ms - status.at_ms <= dead_after_ms}


def chain(manifest: VersionManifest, living: Mapping[str, RelayStatus]) -> list[RelayStatus]:
    """The living relays in the order in which the version reaches them.

    The first is the one that the trainer wrote to. If it is dead or has lost the version, the one with most of it.
    """
    if not living:
        return []
    origin = living.get(manifest.relay_id)
    if origin is None or (origin.boot_id != manifest.relay_boot and not _share(manifest, origin)):
        most = max(_share(manifest, status) for status in living.values())
        origin = min((s for s in living.values() if _share(manifest, s) == most), key=lambda s: s.relay_id)
    first = origin
    rest = (s for s in living.values() if s.relay_id != first.relay_id)
    return [first, *sorted(rest, key=lambda s: (s.zone != first.zone, s.zone, s.relay_id))]


def candidates(
    manifest: VersionManifest, living: Mapping[str, RelayStatus], *, me: str, zone: str = "", skip: Iterable[str] = ()
) -> list[RelayStatus]:
    """From whom to pull, best first: predecessors in the chain, nearest first, then others that hold all of it.

    A reader that is no relay is nobody's successor: for it, whole copies come first, those of its zone before all.
    """
    avoid = {me, *skip}
    order = chain(manifest, living)
    position = next((i for i, s in enumerate(order) if s.relay_id == me), None)
    if position is None:
        found = sorted(order, key=lambda s: (-_share(manifest, s), s.zone != zone))
    else:
        found = order[:position][::-1] + [s for s in order[position + 1 :] if _share(manifest, s) == 1.0]
    return [s for s in found if s.relay_id not in avoid]


def _share(manifest: VersionManifest, status: RelayStatus) -> float:
    """Share of the version that a heartbeat says is there, 0 to 1."""
    for held in status.versions:
        if (held.epoch, held.version) == (manifest.epoch, manifest.version) and held.n_chunks:
            return held.chunks_verified / held.n_chunks
    return 0.0
