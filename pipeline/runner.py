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
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from laminar.operators.measure import Measures
from laminar.operators.operator import Context, Operator
from laminar.operators.registry import build
from laminar.pipeline.config.models import RunConfig, RunnerConfig
from laminar.pipeline.ending import EndWatch
from laminar.pipeline.health import Health, Readiness
from laminar.pipeline.health_watch import HealthWatch
from laminar.pipeline.lag import consumptions
from laminar.pipeline.notify import Notifier
from laminar.pipeline.pulse import Pulse
from laminar.pipeline.stop_request import LeaveAtOnce, StoppedBeforeReady, StopRequest
from laminar.schemas.records import RunEnded
from laminar.streams.background import in_background
from laminar.streams.clock import SteadyClock
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.meter import Meter
from laminar.streams.metered import MeteredLog
from laminar.streams.open import KafkaLogConfig, MemoryLogConfig, open_codec, open_log
from laminar.streams.topics import topic_specs

__all__ = ["READY", "drive", "run_operator"]

READY = "is ready"
"""What a process logs once its operator is built; the supervisor looks for it."""

logger = logging.getLogger(__name__)


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
    pulse.enter("running")
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
    pulse.enter("draining")
    _drain(operator, drain_timeout_s, stop, pulse, settings, clock, sleep)
    return reason


def _count(pulse: Pulse, worked: bool, before: float, after: float, slow_s: float) -> None:
    took = max(0.0, after - before)
    pulse.count(worked=worked, seconds=took, at=after)
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
        pulse.enter("draining")
        if deadline.passed or stop.signals > signals:
            why = "a second signal" if stop.signals > signals else str(deadline.exceeded())
            logger.warning("leaving with work in hand, which its next owner does again: %s", why)
            return
        sleep(settings.idle_min_s)


def run_operator(
    config: RunConfig, name: str, index: int, *, began_at: int | None = None, monitor_port: int | None = None
) -> str:
    """Run one instance until it is asked to stop or the run is over; return why. Raises LaminarError.

    ``began_at``: see EndWatch; None: nobody supervises this process. ``monitor_port``: instead of the configured one.
    """
    stop = StopRequest()
    stop.building = True
    stop.install()
    try:
        return _run(config, name, index, stop, began_at, monitor_port)
    except StoppedBeforeReady:
        return f"{stop.reason} before the operator was ready"
    finally:
        stop.uninstall()


def _run(
    config: RunConfig, name: str, index: int, stop: StopRequest, began_at: int | None, monitor_port: int | None
) -> str:
    instance = f"{name}-{index}"
    clock = SteadyClock()
    pulse, meter, measures = Pulse(last_step_at=clock()), Meter(), Measures()
    reads = next((item for item in consumptions(config) if item.operator == name), None)
    readiness = Readiness(config.monitor, consumption=reads, now=time.monotonic())
    health = Health(pulse, readiness, config.monitor, stopping=lambda: stop.reason)
    notifier = Notifier()
    port = config.monitor.port if monitor_port is None else monitor_port
    with ExitStack() as stack:
        watch = HealthWatch(
            open_log=_own_handle(config) if port else None,
            consumption=reads,
            readiness=readiness,
            meter=meter,
            pulse=pulse,
            settings=config.monitor,
            slow_step_s=config.runner.slow_step_s,
            on_tick=lambda: notifier.beat(health.not_live()),
        )
        stack.enter_context(closing(watch))
        if port:
            from laminar.pipeline.metric import MetricCollector
            from laminar.pipeline.monitor import serve

            labels = {"run": config.name, "operator": name, "replica": str(index)}
            collector = MetricCollector(labels, health=health, meter=meter, measures=measures, watch=watch)
            stack.enter_context(closing(serve(config.monitor.host, port, instance, health, collector)))
        codec = open_codec(config.log)
        codec.prepare()
        log = stack.enter_context(closing(MeteredLog(open_log(config.log, run_id=config.name), meter)))
        if began_at is None:
            log.create_topics(topic_specs(config.log.partitions))
        end_watch = stack.enter_context(
            closing(EndWatch(log, codec, config.name, began_at=began_at, grace_s=config.runner.ended_grace_s))
        )
        context = Context(
            run=config.info(),
            name=name,
            instance=instance,
            log=log,
            codec=codec,
            clock=clock,
            rng=random.Random(f"{config.seed}/{instance}"),
            background=in_background if isinstance(config.log, KafkaLogConfig) else None,
            measures=measures,
        )
        operator = stack.enter_context(closing(build(config.operators[name], context)))
        stop.building = False
        logger.info("%s %s", instance, READY)
        notifier.say("READY=1")
        drain_timeout_s = config.runner.drain_timeout_s
        if began_at is not None:
            drain_timeout_s = min(drain_timeout_s, config.supervisor.drain_timeout_s)
        try:
            with stop.interrupting():
                reason = drive(
                    operator,
                    settings=config.runner,
                    drain_timeout_s=drain_timeout_s,
                    stop=stop,
                    ended=end_watch.poll,
                    pulse=pulse,
                    clock=clock,
                )
        except LeaveAtOnce:
            logger.warning("leaving with work in hand, which its next owner does again: a second signal")
            reason = stop.reason
        notifier.say("STOPPING=1")
        pulse.enter("closed")
    return reason


def _own_handle(config: RunConfig) -> Callable[[], Log] | None:
    """For a second thread; a memory log has none that sees the same records."""
    if isinstance(config.log, MemoryLogConfig):
        return None
    return lambda: open_log(config.log, run_id=config.name)
