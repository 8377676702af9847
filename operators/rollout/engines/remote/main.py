"""What an engine's process does: it takes commands, polls the engine, and reports.

It goes on decoding while the other end is busy, up to ``ahead`` reports that nobody has read yet. When its connection
closes it ends.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from laminar.operators.rollout.engine import Engine
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.stream import Stream
from laminar.operators.rollout.engines.remote.weights import mapped
from laminar.operators.rollout.engines.remote.wire import Piece, Report, gathered, pack, parse, request_of
from laminar.schemas.errors import InvalidRequest, LaminarError, WeightsMismatch
from laminar.schemas.tokens import EMPTY
from laminar.streams.deadline import Deadline

__all__ = ["main"]

_POLL_S = 0.015
"""Of decoding between two looks at the commands."""
_QUICK_S = 0.001
_PAUSE_S = 0.002
"""A poll that took no time is no work: wait so long before the next."""
_LINGER_S = 0.002
"""After an answer, for what the other end wants next: it would wait for a whole poll."""
_BEAT_S = 0.5
"""A report is sent at least so often while there is something to decode."""
_FAREWELL_S = 5.0


class _Server:
    def __init__(self, stream: Stream, engine: Engine, *, ahead: int, gather_s: float) -> None:
        self._stream = stream
        self._engine = engine
        self._ahead = ahead
        self._gather_s = gather_s
        self._numbers: dict[str, int] = {}
        """Of the submissions in the engine, by trajectory."""
        self._seen = 0
        self._unread = 0
        self._said_at = time.monotonic()
        self._refused: list[Piece] = []
        self._held: list[Piece] = []
        """Not reported yet."""

    def serve(self) -> None:
        """Until the other end is gone."""
        stream = self._stream
        while not stream.closed:
            answered = False
            for message in stream.receive():
                answered = self._obey(*parse(message)) or answered
            if answered:
                stream.wait(_LINGER_S)
                continue
            if stream.unsent:
                stream.flush()
            if self._refused:
                self._report(())
            if self._numbers and self._engine.version >= 0 and self._unread < self._ahead:
                self._decode()
            else:
                stream.wait(_BEAT_S)
                self._beat(time.monotonic())

    def _obey(self, head: Mapping[str, Any], behind: memoryview) -> bool:
        """Whether the other end waits for the answer that was sent."""
        match head["do"]:
            case "read":
                self._unread -= head["n"]
                return False
            case "submit":
                self._submit(head, behind)
                return False
            case "abort":
                self._abort(head["id"], head["number"])
            case "load":
                self._load(head["version"], head["table"])
        return True

    def _submit(self, head: Mapping[str, Any], behind: memoryview) -> None:
        self._seen = head["number"] + 1
        request = request_of(head, behind)
        try:
            self._engine.submit(request)
        except InvalidRequest as error:
            self._refused.append(Piece(head["number"], EMPTY, error=f"{type(error).__name__}: {error}"))
        else:
            self._numbers[request.trajectory_id] = head["number"]

    def _abort(self, trajectory_id: str, number: int) -> None:
        rest = None
        if self._numbers.get(trajectory_id) == number:
            del self._numbers[trajectory_id]
            rest = self._engine.abort(trajectory_id)
        pieces = () if rest is None else (Piece(number, rest.tokens, rest.finish, rest.error),)
        self._report(pieces, {"aborted": number})

    def _load(self, version: int, table: Mapping[str, Any]) -> None:
        if self._held:
            self._report(())
        try:
            with mapped(table) as weights:
                self._engine.load(weights, version)
        except WeightsMismatch as error:
            self._report((), {"refused": str(error)})
        else:
            self._report((), {"loaded": version})

    def _decode(self) -> None:
        began = time.monotonic()
        ends = False
        for delta in self._engine.poll(_POLL_S):
            known = delta.trajectory_id
            last = delta.finish is not None or delta.error is not None
            number = self._numbers.pop(known) if last else self._numbers[known]
            self._held.append(Piece(number, delta.tokens, delta.finish, delta.error))
            ends = ends or last
        ended = time.monotonic()
        if ends or (self._held and ended - self._said_at >= self._gather_s):
            self._report(())
        elif not self._held:
            self._beat(ended)
        if ended - began < _QUICK_S:
            self._stream.wait(_PAUSE_S)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def farewell(self) -> None:
        """Report what was sampled before the engine broke."""
        if self._held:
            with suppress(LaminarError):
                self._report(())

    def _beat(self, now: float) -> None:
        if self._numbers and self._unread < self._ahead and now - self._said_at >= _BEAT_S:
            self._report(())

    def _report(self, pieces: tuple[Piece, ...], answer: Mapping[str, Any] | None = None) -> None:
        stats = self._engine.stats()
        waiting = [*self._refused, *gathered(self._held), *pieces]
        self._refused, self._held = [], []
        report = Report(
            seen=self._seen,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_used,
            preempted=stats.preempted,
            pieces=waiting,
            answer=answer or {},
        )
        self._stream.send(pack(report))
        self._unread += 1
        self._said_at = time.monotonic()


def _bear(stream: Stream) -> _Server:
    """Around the engine that the first message asks for."""
    while not (found := stream.receive()):
        if stream.closed:
            sys.exit(0)
        stream.wait(60.0)
    setup, _ = parse(found[0])
    engine = Recipe(factory=setup["factory"], options=setup["options"]).build()
    limits = engine.limits
    ready = {
        "name": engine.name,
        "max_running": limits.max_running,
        "max_model_len": limits.max_model_len,
        "kv_total": limits.kv_total,
        "vocab_size": getattr(engine, "vocab_size", None),
    }
    stream.send(pack(Report(answer={"ready": ready})))
    return _Server(stream, engine, ahead=setup["ahead"], gather_s=setup["gather_s"])


def _say(stream: Stream, answer: Mapping[str, Any]) -> None:
    """Send it even to somebody who is slow to read."""
    stream.send(pack(Report(answer=answer)))
    deadline = Deadline.after(_FAREWELL_S, "the last report of an engine process")
    while stream.unsent and not deadline.passed:
        stream.wait(deadline.remaining())
        stream.flush()


def _pass(number: int, frame: FrameType | None) -> None:
    """It ends with the process that started it, which may still want its tokens."""
    del number, frame


def main(end: int) -> int:
    """Serve the other end of this socket; the exit code."""
    os.set_inheritable(end, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("laminar").setLevel(logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _pass)
    stream = Stream(socket.socket(fileno=end))
    try:
        server = _bear(stream)
    except LaminarError as error:
        _say(stream, {"failed": str(error), "kind": type(error).__name__})
        return 1
    try:
        server.serve()
    except LaminarError as error:
        server.farewell()
        _say(stream, {"broken": str(error)})
        return 1
    server.close()
    gc.freeze()  # spare the interpreter's last collection, seconds with torch in it
    return 0
