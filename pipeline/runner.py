"""Runs one operator in this process: the loop, the waiting, the signals, the end of the run.

The runner calls ``step`` again at once while there is work, and waits a little, ever longer, while there is none. When
a signal asks it to stop, or the run is over, it calls ``drain`` until nothing is in hand or the deadline passes, then
``close``. What was not committed by then is done again by the next owner; nothing is lost.

>>> run_operator(config, "reward", 0)                                                   # doctest: +SKIP
'the run ended at step 64: steps'
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import FrameType

from laminar.operators.operator import Context, Operator
from laminar.operators.registry import build
from laminar.pipeline.config.models import RunConfig, RunnerConfig
from laminar.pipeline.ending import EndWatch
from laminar.schemas.records import RunEnded
from laminar.streams.deadline import Deadline
from laminar.streams.open import open_codec, open_log
from laminar.streams.topics import topic_specs

__all__ = ["READY", "Pulse", "StopRequest", "drive", "run_operator"]

READY = "is ready"
"""What a process logs once its operator is built; the supervisor looks for it."""

logger = logging.getLogger(__name__)


class _StoppedBeforeReady(BaseException):
    """A signal came while the operator was still being built: there is nothing to drain."""


class StopRequest:
    """Set by signals: the first one asks to drain, the second one to leave at once."""

    def __init__(self) -> None:
        self.signals = 0
        self.reason = ""
        self.building = False
        """Nothing is in hand yet: a signal ends the process without waiting for slow imports and model files."""

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """From here on the process only ends: a late signal must not turn a clean exit into a killed one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.request(signal.Signals(number).name)
        if self.building:
            self.building = False
            raise _StoppedBeforeReady

    def request(self, reason: str) -> None:
        """Ask to stop."""
        self.signals += 1
        self.reason = self.reason or reason


@dataclass(slots=True)
class Pulse:
    """An operator's signs of life, for ``/healthz`` and ``/metrics``."""

    steps: int = 0
    """Steps that did something."""
    idle_steps: int = 0
    busy_s: float = 0.0
    """Time inside steps."""
    longest_step_s: float = 0.0
    last_step_at: float = 0.0
    """Unix epoch seconds at which the newest step finished."""
    state: str = "starting"
    """starting, running, draining, closed."""


def drive(
    operator: Operator,
    *,
    settings: RunnerConfig,
    drain_timeout_s: float,
    stop: StopRequest,
    ended: Callable[[float], RunEnded | None],
    pulse: Pulse,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Step until there is a reason to stop, drain, and return the reason. The operator is not closed."""
    wait_s = settings.idle_min_s
    look_again_at = 0.0
    pulse.state = "running"
    while True:
        now = clock()
        if stop.signals:
            reason = stop.reason
            break
        if now >= look_again_at:
            end = ended(now)
            look_again_at = now + settings.follow_period_s
            if end is not None:
                reason = f"the run ended at step {end.step}: {end.reason}"
                break
        worked = operator.step(now)
        _count(pulse, worked, now, clock(), settings.slow_step_s)
        if worked:
            wait_s = settings.idle_min_s
        else:
            sleep(wait_s)
            wait_s = min(wait_s * 2, settings.idle_max_s)
    logger.info("draining: %s", reason)
    pulse.state = "draining"
    _drain(operator, drain_timeout_s, stop, pulse, settings, clock, sleep)
    return reason


def _count(pulse: Pulse, worked: bool, before: float, after: float, slow_s: float) -> None:
    took = after - before
    pulse.steps += worked
    pulse.idle_steps += not worked
    pulse.busy_s += took
    pulse.longest_step_s = max(pulse.longest_step_s, took)
    pulse.last_step_at = after
    if took > slow_s:
        logger.warning("a step took %.1f s (limit %g s)", took, slow_s)


def _drain(
    operator: Operator,
    timeout_s: float,
    stop: StopRequest,
    pulse: Pulse,
    settings: RunnerConfig,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    deadline = Deadline.after(timeout_s, "drain", clock)
    signals = max(1, stop.signals)
    while not operator.drain(clock()):
        pulse.last_step_at = clock()
        if deadline.passed or stop.signals > signals:
            why = "a second signal" if stop.signals > signals else str(deadline.exceeded())
            logger.warning("leaving with work in hand, which its next owner does again: %s", why)
            return
        sleep(settings.idle_min_s)


def run_operator(
    config: RunConfig, name: str, index: int, *, began_at: int | None = None, monitor_port: int | None = None
) -> str:
    """Run one instance until it is asked to stop or the run is over; return why. Raises LaminarError.

    ``began_at``: see EndWatch. ``monitor_port``: instead of the configured one.
    """
    stop = StopRequest()
    stop.building = True
    stop.install()
    try:
        return _run(config, f"{name}-{index}", name, stop, began_at, monitor_port)
    except _StoppedBeforeReady:
        return f"{stop.reason} before the operator was ready"
    finally:
        stop.uninstall()


def _run(
    config: RunConfig, instance: str, name: str, stop: StopRequest, began_at: int | None, monitor_port: int | None
) -> str:
    pulse = Pulse(last_step_at=time.time())
    with ExitStack() as stack:
        port = config.monitor.port if monitor_port is None else monitor_port
        if port:
            from laminar.pipeline.monitor import serve

            stack.enter_context(closing(serve(config.monitor.host, port, pulse, instance, config.monitor)))
        codec = open_codec(config.log)
        codec.prepare()
        log = stack.enter_context(closing(open_log(config.log, run_id=config.name)))
        if began_at is None:
            log.create_topics(topic_specs(config.log.partitions))
        watch = stack.enter_context(
            closing(EndWatch(log, codec, config.name, began_at=began_at, grace_s=config.runner.ended_grace_s))
        )
        context = Context(
            run=config.info(),
            name=name,
            instance=instance,
            log=log,
            codec=codec,
            rng=random.Random(f"{config.seed}/{instance}"),
        )
        operator = stack.enter_context(closing(build(config.operators[name], context)))
        stop.building = False
        logger.info("%s %s", instance, READY)
        reason = drive(
            operator,
            settings=config.runner,
            drain_timeout_s=config.supervisor.drain_timeout_s,
            stop=stop,
            ended=watch.poll,
            pulse=pulse,
        )
    pulse.state = "closed"
    return reason
