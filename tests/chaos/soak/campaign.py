"""Runs one campaign: starts a deployment, breaks it as planned, lets it finish, and reads what the topics say.

Everything that is done is written to ``events.jsonl`` in the campaign's folder, with the seconds since its start. A
stall above the bound, an exit that nobody asked for, or a violation fails it; the folder then holds all that is needed
to find out why: the log of every process and of the broker, the broker's data, the run folder.
"""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from laminar.pipeline.exit_code import RETRYABLE
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import LaminarError
from laminar.streams.deadline import Deadline
from laminar.streams.open import open_log
from laminar.streams.reading import decoded, read_topic
from tests.chaos.soak.deployment import Deployment
from tests.chaos.soak.evidence import Evidence, gather
from tests.chaos.soak.fault import BROKER, SUPERVISOR, Fault
from tests.chaos.soak.observation import Observation

__all__ = ["Campaign", "CampaignFailed"]

_TICK_S = 0.05
_FULL_DISK_BYTES = 4096
_LAST_STEPS = 8
"""Made after the last fault by a ``laminar run`` that ends by itself."""
_UNLIMITED_WAIT_S = 300.0
_START_GRACE_S = 60.0


class CampaignFailed(AssertionError):
    """What went wrong, with everything that helps to find out why."""


@dataclass
class Campaign:
    """See the module's docstring."""

    deployment: Deployment
    faults: Sequence[Fault]
    stall_bound_s: float = 120.0
    """Longest time without an optimizer step, the time without a broker not counted."""
    done: list[Fault] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults whose target was not there (it was starting)."""
    evidence: Evidence | None = None
    failure: str | None = None
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._broker_down: float | None = None
        self._stopped: set[str] = set()
        self._allowed_s = 0.0
        self.seen = Observation(self.deployment)

    # -- the whole of it

    def run(self) -> Evidence:
        """Raises CampaignFailed. What was seen so far stands in the fields, whatever happens."""
        try:
            self.deployment.open()
            self.deployment.start()
            self.seen.last_progress = time.monotonic()
            self._until(lambda: self.seen.step >= 1, "the first step", _UNLIMITED_WAIT_S)
            for fault in self.faults:
                self._pass(fault.gap_s)
                self._do(fault)
            self._settle()
            self._finish()
            self.evidence = self._judge()
            return self.evidence
        except CampaignFailed as error:
            self.failure = str(error)
            raise
        except (LaminarError, OSError, subprocess.TimeoutExpired) as error:
            self.failure = self._story(f"{type(error).__name__}: {error}")
            raise CampaignFailed(self.failure) from error
        finally:
            self.wall_s = time.monotonic() - self._began
            self.failure = self.failure or (None if self.evidence else "interrupted")
            self.deployment.close()

    # -- time

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _until(self, holds: Callable[[], bool], name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise CampaignFailed(self._story(f"{name}: not within {timeout_s:g} s"))
            self._tick()

    def _tick(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        self.seen.look()
        self._look_after_run()
        if self._broker_down is not None:
            self._allowed_s = time.monotonic() - self.seen.last_progress
        elif self.seen.stalled_s() < 1.0:
            self._allowed_s = 0.0
        if self.seen.stalled_s() > self.stall_bound_s + self._allowed_s + _START_GRACE_S * (self.seen.steps_seen == 0):
            raise CampaignFailed(self._story(f"no optimizer step for {self.seen.stalled_s():.0f} s"))
        time.sleep(_TICK_S)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._number), act))

    def _say(self, what: str, **more: object) -> None:
        line = {"at_s": round(time.monotonic() - self._began, 2), "what": what, "step": self.seen.step, **more}
        with (self.deployment.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _look_after_run(self) -> None:
        """Whoever starts ``laminar run`` (systemd, say) starts it again where its exit code says that this may help."""
        code = self.deployment.exit_code
        if code is None or SUPERVISOR in self._stopped:
            return
        if code not in (RETRYABLE, -signal.SIGKILL):
            raise CampaignFailed(self._story(f"`laminar run` ended with code {code}"))
        if self._broker_down is not None:
            return  # it could only fail again
        self._say("laminar run is started again", code=code)
        if code == RETRYABLE:
            self.missed["laminar run gave up (75)"] += 1
        self._start_run()

    def _start_run(self, *settings: str) -> None:
        self._stopped.discard(SUPERVISOR)
        self.deployment.start(*settings)

    # -- faults

    def _do(self, fault: Fault) -> None:
        self._say(fault.kind, targets=fault.targets, seconds=round(fault.seconds, 1))
        if fault.targets == (BROKER,):
            self._break_broker(fault)
            self.done.append(fault)
            return
        hit = []
        for target in fault.targets:
            if fault.kind in ("kill", "clock") and target != SUPERVISOR:
                self._until_there(target)
            act = {
                "kill": self._kill,
                "pause": self._pause,
                "disk": self._fill_disk,
                "clock": self._set_clock,
                "clock_step": self._set_clock,
            }
            if act[fault.kind](fault, target):
                hit.append(target)
            else:
                self.missed[fault.kind] += 1
        if hit:
            self.done.append(Fault(kind=fault.kind, targets=tuple(hit), gap_s=fault.gap_s, seconds=fault.seconds))

    def _until_there(self, target: str) -> None:
        """A process that is starting again is waited for, so that the number of kills is what was asked for."""
        deadline = time.monotonic() + _START_GRACE_S
        while self.deployment.pid(target) is None and time.monotonic() < deadline:
            self._tick()

    def _kill(self, fault: Fault, target: str) -> bool:
        if target == SUPERVISOR:
            if not self.deployment.running:
                return False
            self._stopped.add(SUPERVISOR)
            self.deployment.send(target, signal.SIGKILL)
            self.deployment.wait(30.0)
            for instance in self.deployment.instances:
                self.seen.expect(instance, "kill of the supervisor")
            self._after(fault.seconds, self._restart_run)
            return True
        if self.deployment.send(target, signal.SIGKILL) is None:
            return False
        self.seen.expect(target, fault.kind)
        return True

    def _restart_run(self) -> None:
        if self._broker_down is not None:
            self._after(0.5, self._restart_run)
            return
        self._start_run()

    def _pause(self, fault: Fault, target: str) -> bool:
        pid = self.deployment.send(target, signal.SIGSTOP)
        if pid is None:
            return False

        def wake() -> None:
            if self.deployment.pid(target) == pid:
                self.deployment.send(target, signal.SIGCONT)

        self._after(fault.seconds, wake)
        return True

    def _fill_disk(self, fault: Fault, target: str) -> bool:
        if not self.deployment.limit_files(target, _FULL_DISK_BYTES):
            return False

        def free() -> None:
            for instance in (target, *(self.deployment.instances if target == SUPERVISOR else ())):
                self.deployment.limit_files(instance, None)
            self.seen.excuse()

        self._after(fault.seconds, free)
        return True

    def _set_clock(self, fault: Fault, target: str) -> bool:
        (self.deployment.clocks / target).write_text(str(fault.step_s))
        if fault.kind == "clock_step":
            return True
        if self.deployment.send(target, signal.SIGKILL) is None:
            return False
        self.seen.expect(target, fault.kind)
        return True

    def _break_broker(self, fault: Fault) -> None:
        broker = self.deployment.broker
        self._broker_down = time.monotonic()
        if fault.kind == "pause_broker":
            self.deployment.send(BROKER, signal.SIGSTOP)
            self._pass(fault.seconds)
            self.deployment.send(BROKER, signal.SIGCONT)
        else:
            if fault.kind == "kill_broker":
                broker.kill()
            else:
                self.seen.away()
                broker.stop()
            self._pass(fault.seconds)
            broker.start()
        self._broker_down = None
        self._say("the broker is back")

    # -- the end

    def _settle(self) -> None:
        """Everything is mended; the run must come to itself."""
        while self._later:
            self._tick()
        self._until(lambda: not self.seen.waiting() and self.deployment.running, "all processes are ready again", 300.0)
        step = self.seen.steps_seen
        self._until(lambda: self.seen.steps_seen >= step + 3, "three steps after the last fault", 300.0)

    def _finish(self) -> None:
        """Stop in order, and resume with an end in sight."""
        self._stopped.add(SUPERVISOR)
        code = self.deployment.stop()
        self._say("stopped", code=code)
        if code != 128 + signal.SIGTERM:
            raise CampaignFailed(self._story(f"`laminar run` ended with code {code} after SIGTERM"))
        self.deployment.start(f"steps={self.seen.step + _LAST_STEPS}")
        code = self.deployment.wait(_UNLIMITED_WAIT_S)
        self.seen.look()
        self._say("finished", code=code)
        if code != 0:
            raise CampaignFailed(self._story(f"the last `laminar run` ended with code {code}"))

    def _judge(self) -> Evidence:
        found = gather(self.deployment.config())
        ledger = found.ledger
        if not ledger.balanced:
            raise CampaignFailed(self._story("the ledger: " + "; ".join(map(str, ledger.violations[:20]))))
        if found.wrong:
            raise CampaignFailed(self._story("not what the script dictates: " + "; ".join(found.wrong[:20])))
        return found

    # -- when it fails

    def _story(self, what: str) -> str:
        return "\n".join([what, *self._clues(), f"everything is kept in {self.deployment.folder}"])

    def _clues(self) -> Iterator[str]:
        deployment = self.deployment
        yield f"step {self.seen.step}, not ready: {', '.join(self.seen.waiting()) or 'nobody'}"
        yield f"last faults: {[(f.kind, *f.targets) for f in self.done[-6:]]}"
        if deployment.broker.running:
            yield from self._clues_of_the_log()
        for instance in deployment.instances:
            path = deployment.log_path(instance)
            tail = path.read_bytes()[-1500:].decode("utf-8", "replace").splitlines()[-4:] if path.exists() else []
            yield f"--- {instance}"
            yield from tail
        yield "--- laminar run"
        yield deployment.output(2000)

    def _clues_of_the_log(self) -> Iterator[str]:
        try:
            config = self.deployment.config()
            deadline, codec = Deadline.after(30.0, "clues"), Codec()
            with closing(open_log(config.log, run_id=config.name)) as log:
                for operator, topic in (
                    ("rollout", "prompts"),
                    ("reward", "trajectories.completed"),
                    ("trainer", "trajectories.scored"),
                ):
                    yield f"lag of {operator} on {topic}: {sum(log.lag(f'{config.name}.{operator}', topic).values())}"
                beats = {}
                for record, status in decoded(read_topic(log, "rollouts.status", deadline), codec):
                    if isinstance(status, r.RolloutStatus):
                        beats[status.rollout_id] = (record.timestamp_ms, status)
                for name, (at_ms, status) in sorted(beats.items()):
                    yield (
                        f"last heartbeat of {name}: {time.time() - at_ms / 1000:.1f} s ago, incarnation"
                        f" {status.incarnation}, {status.state}, version {status.version},"
                        f" {len(status.in_flight)} in hand"
                    )
        except LaminarError as error:
            yield f"the log does not say: {type(error).__name__}: {error}"
