"""Any engine in a process of its own: the rollout operator calls this, the process decodes meanwhile.

Guarantees, beside those of ``laminar.operators.rollout.engine``:

* The process goes on while the operator is busy, until ``ahead`` of its reports are unread. ``abort`` and ``load`` wait
  for their answer; ``submit``, ``poll`` and ``stats`` never wait for the process.
* A request that only the process can refuse comes back as a delta with an error.
* Weights go by the files that they lie in; the process maps them.
* A process that ended, or had work and reported nothing for ``hung_after_s`` (``load_hung_after_s`` while it loads), is
  lost: it is killed with everything that it started. ``poll`` first gives out all that had arrived, and then raises
  EngineLost, once; ``abort`` returns what had arrived. ``load`` and ``restart`` raise it at once: what had arrived and
  was not polled is given up. After that ``poll`` returns [] and starts a new process without waiting for it, ever
  later; after ``start_attempts`` failed starts in a row it raises Unavailable.
* The first start is waited for. What is wrong with it flies as it would from an engine in this process.
* When this process ends, in whatever way, so does the other.

>>> engine = RemoteEngine(recipe, decoder=load_decoder)                        # doctest: +SKIP
>>> engine.load(tensors, version=3)                                            # doctest: +SKIP
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from laminar.operators.rollout.engine import Delta, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.engines.recipe import Recipe
from laminar.operators.rollout.engines.remote.health import Silence
from laminar.operators.rollout.engines.remote.process import EngineProcess
from laminar.operators.rollout.engines.remote.requests import Requests
from laminar.operators.rollout.engines.remote.supervisor import Facts, RemoteSettings, Supervisor
from laminar.operators.rollout.engines.remote.weights import placed
from laminar.operators.rollout.engines.remote.wire import Report, command, submission, unpack
from laminar.operators.rollout.engines.text import Decoder
from laminar.operators.rollout.engines.torch_limits import check_request
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, EngineLost, InvalidRequest, Unavailable, WeightsMismatch
from laminar.streams.deadline import Deadline

__all__ = ["RemoteEngine"]

_LOOK_S = 0.05
"""Between two looks at whether the process still runs."""
_ANY_ID = 1 << 31

logger = logging.getLogger(__name__)


class RemoteEngine:
    """See the module's docstring.

    ``decoder`` makes the decoder of this process, while the engine starts in the other. Raises ConfigError, or
    Unavailable when the process ended or did not start in time.
    """

    def __init__(
        self, recipe: Recipe, *, decoder: Callable[[], Decoder], settings: RemoteSettings | None = None
    ) -> None:
        self._settings = settings or RemoteSettings()
        self._supervisor = Supervisor(recipe, self._settings)
        self._silence = Silence(self._settings.hung_after_s, 0.0)
        self._read_at_once = max(1, self._settings.ahead // 2)
        self._lost: str | None = None
        """Why it is lost, until that was raised."""
        self._closed = False
        try:
            self._supervisor.begin()
            wrong: ConfigError | None = None
            try:
                self._decode: Decoder = decoder()
            except ConfigError as error:  # the engine itself may say it better
                wrong = error
            facts = self._supervisor.first()
            if wrong is not None:
                raise wrong
        except BaseException:
            self._supervisor.close()
            raise
        self._adopt(facts)

    @property
    def name(self) -> str:
        """See Engine.name."""
        return self._facts.name

    @property
    def version(self) -> int:
        """Policy version loaded; -1 before the first load."""
        return self._version

    @property
    def limits(self) -> EngineLimits:
        """Of the process that started last."""
        return self._facts.limits

    @property
    def ready(self) -> bool:
        """Whether it takes weights and requests. False while it starts anew, and once it is known to be lost."""
        if self._ready and self._lost is None and not self._requests and time.monotonic() >= self._next_look:
            self._look(0.0)  # nobody need poll an engine without work
        return self._ready and self._lost is None

    @property
    def pid(self) -> int | None:
        """Of the process that runs or starts."""
        process = self._supervisor.process
        return None if process is None else process.pid

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest when it can never be served (naming the limit)."""
        self._must_be_ready()
        where = request.trajectory_id
        if where in self._requests:
            raise InvalidRequest(f"{where}: already in the engine")
        check_request(request, self._facts.limits, self._facts.vocab_size or _ANY_ID)
        if not self._requests:
            self._silence.heard(time.monotonic())
        number = self._requests.add(where)
        if self._lost is None:
            self._process.stream.send(submission(number, request))

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""
        number = self._requests.number(trajectory_id)
        if number is None:
            return None
        if not self._requests.has_ended(number) and self._lost is None:
            self._ask(command("abort", id=trajectory_id, number=number), "abort", self._settings.hung_after_s)
        return self._requests.withdraw(trajectory_id)

    def poll(self, timeout_s: float) -> list[Delta]:
        """What has arrived; waits for it up to ``timeout_s`` when there is something to wait for.

        Raises EngineLost once when the process is lost and everything that had arrived was given out.
        """
        if self._closed:
            return []
        if not self._ready:
            facts = self._supervisor.again()
            if facts is not None:
                self._adopt(facts)
            return []
        if self._lost is None:
            self._look(timeout_s)
        if self._requests.arrived:
            return self._requests.give_out()
        if self._lost is not None:
            raise self._said_lost()
        return []

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """Take new weights (copied before return).

        Raises WeightsMismatch before anything was changed, or EngineLost.
        """
        self._must_be_ready()
        answer = None
        if self._lost is None:
            with placed(weights) as table:
                answer = self._ask(
                    command("load", version=version, table=table),
                    f"load of version {version}",
                    self._settings.load_hung_after_s,
                )
        if answer is None:
            raise self._said_lost()
        if "refused" in answer:
            raise WeightsMismatch(answer["refused"])
        self._version = version

    def stats(self) -> EngineStats:
        """Counts as of the newest report; what the process has not seen yet waits."""
        limits = self._facts.limits
        if not self._ready or self._lost is not None:
            return EngineStats(running=0, waiting=0, kv_used=0, kv_total=limits.kv_total)
        report = self._report
        return EngineStats(
            running=report.running,
            waiting=report.waiting + self._requests.submitted - report.seen,
            kv_used=report.kv_used,
            kv_total=limits.kv_total,
            preempted=report.preempted,
        )

    def restart(self, why: str) -> None:
        """Give up everything in it and start anew without weights: raises EngineLost."""
        if self._ready and self._lost is None:
            self._lose(f"was given up: {why}")
        elif not self._ready:
            self._supervisor.end()
            self._lost = f"was given up while it started: {why}"
        raise self._said_lost()

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of response tokens, without special tokens."""
        return self._decode(ids)

    def close(self) -> None:
        """Free everything."""
        self._closed, self._ready = True, False
        self._supervisor.close()

    # -- the process

    @property
    def _process(self) -> EngineProcess:
        process = self._supervisor.process
        assert process is not None
        return process

    def _adopt(self, facts: Facts) -> None:
        """A new process is ready."""
        self._facts = facts
        self._version = -1
        self._ready = True
        self._requests = Requests()
        self._report = Report()
        self._answer: Mapping[str, Any] | None = None
        self._unread = 0
        """Reports that it was not told to be read."""
        self._next_look = 0.0
        self._silence.heard(time.monotonic())

    def _look(self, timeout_s: float) -> None:
        """Take what has come; notice when nothing comes any more."""
        stream = self._process.stream
        if stream.unsent:
            stream.flush()
        if self._receive():
            return
        if timeout_s > 0 and self._requests:
            stream.wait(timeout_s)
            if self._receive():
                return
        now = time.monotonic()
        if stream.closed or now >= self._next_look:
            self._next_look = now + _LOOK_S
            if self._ended():
                return
        if not self._requests:
            self._silence.heard(now)
        elif self._silence.lasts(now):
            self._hung(f"with {len(self._requests)} requests in it", self._silence.limit_s)

    def _receive(self) -> bool:
        """Whether something came."""
        stream = self._process.stream
        messages = stream.receive()
        if not messages:
            return False
        for message in messages:
            report = unpack(message)
            self._report = report
            self._requests.take(report.pieces)
            if report.answer:
                self._answer = report.answer
        self._unread += len(messages)
        if self._unread >= self._read_at_once:
            stream.send(command("read", n=self._unread))
            self._unread = 0
        self._silence.heard(time.monotonic())
        if self._answer is not None and "broken" in self._answer:
            self._lose(f"is out of service: {self._answer['broken']}")
        return True

    def _ask(self, message: bytes, what: str, timeout_s: float) -> Mapping[str, Any] | None:
        """The answer to a command; None: it is lost."""
        stream = self._process.stream
        deadline = Deadline.after(timeout_s, what)
        self._answer = None
        stream.send(message)
        while self._lost is None:
            stream.flush()
            self._receive()
            if self._lost is None and self._answer is not None:
                return self._answer
            if self._lost is not None or self._ended():
                break
            if deadline.passed:
                self._hung(f"asked for: {what}", timeout_s)
            else:
                stream.wait(min(_LOOK_S, deadline.remaining()))
        return None

    def _ended(self) -> bool:
        """Whether the process is gone; what it had sent is received."""
        process = self._process
        if not process.stream.closed and process.runs:
            return False
        process.settle()
        while not process.stream.closed and self._receive():
            continue
        if self._lost is None:
            self._lose(f"is lost: its process {process.describe_end()}")
        return True

    def _hung(self, when: str, seconds: float) -> None:
        process = self._process
        process.interrogate()
        words = process.last_words()
        self._lose(
            f"is lost: its process (pid {process.pid}) reported nothing for {seconds:g} s, {when}, and was killed"
            + (f"; it wrote: {words}" if words else "")
        )

    def _lose(self, why: str) -> None:
        self._lost = why
        self._supervisor.end()

    def _said_lost(self) -> EngineLost:
        """The error to raise, once: everything in it is forgotten."""
        error = EngineLost(f"engine {self.name} {self._lost}")
        logger.info("%s; it starts anew", error)
        self._lost = None
        self._ready = False
        self._version = -1
        self._requests = Requests()
        return error

    def _must_be_ready(self) -> None:
        if not self._ready:
            raise Unavailable(f"engine {self.name}: {'was closed' if self._closed else 'has not started anew yet'}")
