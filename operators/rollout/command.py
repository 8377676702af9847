"""The commands meant for this process: a rollout reads ``rollouts.commands`` from the end that it saw at its start.

What stood there before was for its predecessor; nobody can address a process before its first heartbeat.
"""

from __future__ import annotations

import logging

from laminar.schemas.codec import Codec
from laminar.schemas.records import AdoptCommand, DrainCommand, ReleaseCommand
from laminar.streams.log import Log
from laminar.streams.reading import Tail, decoded

__all__ = ["Command", "Commands"]

_TOPIC = "rollouts.commands"
_BATCH = 256

Command = AdoptCommand | DrainCommand | ReleaseCommand

logger = logging.getLogger(__name__)


class Commands:
    """Follows the topic."""

    def __init__(self, log: Log, codec: Codec, rollout_id: str) -> None:
        self._codec = codec
        self._rollout_id = rollout_id
        self._key = rollout_id.encode()
        self._tail = Tail(log, [_TOPIC], start="end")

    def poll(self, incarnation: int) -> list[Command]:
        """New commands for this incarnation, in order. Those for another one are nobody's."""
        found: list[Command] = []
        mine = (record for record in self._tail.poll(_BATCH) if record.key == self._key)
        for record, command in decoded(mine, self._codec):
            if not isinstance(command, Command) or command.rollout_id != self._rollout_id:
                continue
            if command.incarnation != incarnation:
                logger.info("%s: %s is for another incarnation", record.where, type(command).__name__)
                continue
            found.append(command)
        return found

    def close(self) -> None:
        """Release the reader."""
        self._tail.close()
