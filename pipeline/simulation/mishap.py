"""The faults that happen at their time: of the network, the broker and the relay; processes that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.pipeline.simulation.clock import EPOCH_S
from laminar.pipeline.simulation.fault import Fault
from laminar.pipeline.simulation.process import Process
from laminar.schemas import records as r
from laminar.streams.log import OutRecord, TopicPartition

if TYPE_CHECKING:
    from laminar.pipeline.simulation.world import World

__all__ = ["Mishaps"]


class Mishaps:
    """See the module's docstring."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world = world
        self._coming = list(faults)
        self._back: dict[str, float | None] = {}
        self._writers = 0

    def next_at(self) -> float:
        """When the next one happens."""
        return EPOCH_S + self._coming[0].at if self._coming else math.inf

    def stop(self) -> None:
        """Nothing happens any more."""
        self._coming.clear()

    def back_in(self, process: Process) -> float | None:
        """How long after it drained a process comes back; None: never."""
        return self._back.pop(process.instance, None)

    def happen(self) -> None:
        """The next one."""
        fault = self._coming.pop(0)
        world = self._world
        now = world.clock.now
        world.trace.add("**", str(fault))
        world.counts[fault.kind] += 1
        process = world.current(fault.target) if fault.target else None
        match fault.kind:
            case "ambush":
                world.ambush = fault
            case "away":
                world.broker_back_at = now + fault.seconds
            case "cut" if process is not None:
                process.reach.cut_until = now + fault.seconds
            case "late" if process is not None:
                process.reach.late_until[fault.topic] = now + fault.seconds
            case "relay_stall":
                world.relay.stalled_until, world.relay.slow = now + fault.seconds, fault.coin
            case "relay_lose":
                self._lose(fault)
            case "engine_crash" if process is not None and process.engine is not None:
                process.engine.broken = True
            case "engine_lost" if process is not None and process.engine is not None:
                process.engine.lose(at=fault.call, skip=fault.skip, away=fault.seconds)
            case "engine_stall" if process is not None and process.engine is not None:
                process.engine.stalled_until = now + fault.seconds
            case "damage":
                self._damage(fault)
            case "twin" if process is not None and process.operator is not None:
                process.replaced = True
                world.add(fault.target, fault.seconds).armed[:] = process.armed
            case "drain" | "leave" if process is not None and process.operator is not None:
                process.draining = True
                self._back[process.instance] = fault.seconds if fault.kind == "drain" else 2.0 * fault.seconds
            case "join" if process is None:
                world.add(fault.target, 0.0)
            case _:
                world.counts[fault.kind] -= 1

    def _lose(self, fault: Fault) -> None:
        """A version is lost; or the machine of the trainer and its relay, and so all of them."""
        world = self._world
        trainer = world.current("trainer-0")
        if not fault.coin or trainer is None or trainer.stopped:
            world.relay.lose_oldest()
            return
        world.relay.lose_all()
        if trainer.operator is not None:
            world.end(trainer, "died with its machine", fault.seconds, close=False)

    def _damage(self, fault: Fault) -> None:
        """Somebody writes what does not belong there."""
        world = self._world
        partition = TopicPartition(fault.topic, 0)
        held = world.broker.partitions[partition].records
        whole = next((record.value for record in held if record.value), b"\xc3\x01")
        other = r.DrainCommand(rollout_id="nobody", incarnation=0, at_ms=0)
        value = (b"rubbish", whole[:-3], None, world.codec.encode(other))[fault.skip]
        if value is None and fault.topic == "weights.versions":
            value = b""
        self._writers += 1
        with world.log.producer(f"vandal-{self._writers}").transaction() as tx:
            tx.send(OutRecord(topic=fault.topic, key=b"damaged", value=value, partition=0))
