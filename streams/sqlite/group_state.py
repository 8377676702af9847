"""A consumer group's state as the text that stands in the database."""

from __future__ import annotations

import json

from laminar.streams.embedded.assignment import Assignor
from laminar.streams.embedded.group import Group, Member, Ownership
from laminar.streams.log import TopicPartition

__all__ = ["dump", "load"]


def dump(group: Group) -> str:
    """Everything but name, revision and assignor."""
    return json.dumps(
        {
            "members": {m: [k.instance, sorted(k.topics), k.seen, k.session_s] for m, k in group.members.items()},
            "owners": [[*p, held.target, held.owner, held.since] for p, held in group.owners.items()],
            "partitions": group.partitions,
        }
    )


def load(name: str, assignor: Assignor, revision: int, text: str) -> Group:
    """The inverse of dump."""
    state = json.loads(text)
    return Group(
        name,
        assignor,
        revision,
        members={m: Member(k[0], frozenset(k[1]), k[2], k[3]) for m, k in state["members"].items()},
        owners={TopicPartition(o[0], o[1]): Ownership(o[2], o[3], o[4]) for o in state["owners"]},
        partitions=state["partitions"],
    )
