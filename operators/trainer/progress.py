"""Where the trainer stands, and its form inside a checkpoint.

Everything but the learner: step, version, epoch, read positions, the groups that are done, the groups that wait (as the
bytes that were read) and the answers of evaluation rounds. One value, so that no part can be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.operators.trainer.batch import Answer, Arrival, Assembly, Death, Group, Round
from laminar.operators.trainer.checkpoint import Saved
from laminar.operators.trainer.done import DoneGroups
from laminar.schemas.codec import Codec
from laminar.schemas.errors import CheckpointError, DecodeError
from laminar.schemas.records import ScoredTrajectory
from laminar.streams.log import TopicPartition

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """See the module's docstring."""

    step: int = 0
    """Optimizer steps done."""
    version: int = -1
    """Policy version of the weights; -1 before the first was given one."""
    epoch: int = -1
    positions: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Next offset to read."""
    assembly: Assembly = field(default_factory=Assembly)

    def pack(self) -> Saved:
        """As a checkpoint holds it."""
        assembly = self.assembly
        arrivals: list[Arrival] = []
        groups = [_packed(group, arrivals) for group in assembly.groups.values()]
        lost = [_packed(group, arrivals) for group in assembly.lost.values()]
        returned = Group(group_id="", members={a.scored.trajectory.trajectory_id: a for a in assembly.returned})
        state = {
            "format": 1,
            "step": self.step,
            "version": self.version,
            "epoch": self.epoch,
            "positions": [[*partition, offset] for partition, offset in sorted(self.positions.items())],
            "groups": groups,
            "ready": list(assembly.ready),
            "done": {"ranges": assembly.done.ranges, "others": sorted(assembly.done.others)},
            "rounds": [
                {
                    "number": number,
                    "size": known.size,
                    "prefix": known.prefix,
                    "answers": [[a.trajectory_id, a.reward, a.version] for a in known.answers.values()],
                    "dead": sorted(known.dead),
                }
                for number, known in assembly.rounds.items()
            ],
            "closed_rounds": sorted(assembly.closed_rounds),
            "late": assembly.late,
            "duplicates": assembly.duplicates,
            "lost": lost,
            "buried": sorted(assembly.buried),
            "unnamed": {group: sorted(ids) for group, ids in assembly.unnamed.items()},
            "owed": sorted(assembly.owed),
            "returned": _packed(returned, arrivals),
        }
        return Saved(state, tuple(a.value for a in arrivals))

    @classmethod
    def unpack(cls, saved: Saved, codec: Codec, where: str) -> Progress:
        """Back from a checkpoint. Raises CheckpointError naming ``where``."""
        try:
            return _unpack(saved, codec)
        except (KeyError, TypeError, ValueError, IndexError, DecodeError) as error:
            raise CheckpointError(f"{where}: damaged ({type(error).__name__}: {error})") from error


def _packed(group: Group, arrivals: list[Arrival]) -> dict[str, Any]:
    """One group; the records of its members go to ``arrivals``."""
    members: list[dict[str, Any]] = []
    for trajectory, member in group.members.items():
        entry: dict[str, Any] = {"id": trajectory, "at": [*member.source, member.offset]}
        if isinstance(member, Arrival):
            entry["record"] = len(arrivals)
            arrivals.append(member)
        elif member.unnamed:
            entry["unnamed"] = True
        members.append(entry)
    return {"id": group.group_id, "members": members}


def _unpacked(entry: Mapping[str, Any], saved: Saved, codec: Codec) -> Group:
    members: dict[str, Arrival | Death] = {}
    for member in entry["members"]:
        topic, partition, offset = member["at"]
        source = TopicPartition(topic, partition)
        if "record" not in member:
            members[member["id"]] = Death(
                group_id=entry["id"],
                trajectory_ids=(member["id"],),
                source=source,
                offset=offset,
                unnamed=member.get("unnamed", False),
            )
            continue
        value = saved.records[member["record"]]
        scored = codec.decode(value)
        if not isinstance(scored, ScoredTrajectory):
            raise ValueError(f"a {type(scored).__name__} among the waiting groups")
        members[member["id"]] = Arrival(scored=scored, source=source, offset=offset, value=value)
    return Group(group_id=entry["id"], members=members)


def _unpack(saved: Saved, codec: Codec) -> Progress:
    state = saved.state
    groups = {entry["id"]: _unpacked(entry, saved, codec) for entry in state["groups"]}
    lost = {entry["id"]: _unpacked(entry, saved, codec) for entry in state.get("lost", ())}
    returned = _unpacked(state["returned"], saved, codec).scored if "returned" in state else []
    rounds = {
        known["number"]: Round(
            size=known["size"],
            prefix=known["prefix"],
            answers={i: Answer(trajectory_id=i, reward=reward, version=v) for i, reward, v in known["answers"]},
            dead=frozenset(known["dead"]),
        )
        for known in state["rounds"]
    }
    ranges = {prefix: tuple((a, b) for a, b in kept) for prefix, kept in state["done"]["ranges"].items()}
    return Progress(
        step=state["step"],
        version=state["version"],
        epoch=state["epoch"],
        positions={TopicPartition(topic, partition): offset for topic, partition, offset in state["positions"]},
        assembly=Assembly(
            groups=groups,
            ready=tuple(state["ready"]),
            rounds=rounds,
            closed_rounds=frozenset(state["closed_rounds"]),
            done=DoneGroups(ranges, frozenset(state["done"]["others"])),
            late=state["late"],
            duplicates=state["duplicates"],
            lost=lost,
            buried=frozenset(state.get("buried", ())),
            unnamed={group: frozenset(ids) for group, ids in state.get("unnamed", {}).items()},
            owed=frozenset(state.get("owed", ())),
            returned=tuple(returned),
        ),
    )
