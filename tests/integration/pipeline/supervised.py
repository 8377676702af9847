"""A supervisor over toy processes, for tests; as a script (``supervised.py FOLDER BEHAVIOUR ...``), one to kill."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from laminar.operators.operator import ModelConfig
from laminar.operators.relay.config import RelayConfig
from laminar.pipeline.config.models import RunConfig, SupervisorConfig
from laminar.pipeline.run_folder import RunFolder
from laminar.pipeline.supervisor import Outcome, Supervisor
from laminar.pipeline.view import View
from laminar.streams.open import SqliteLogConfig, open_log
from laminar.streams.topics import topic_specs

TOY = Path(__file__).with_name("toy.py")


@dataclass
class Hook:
    """A screen that a test acts from: it is shown the run every half second."""

    act: Callable[[View], None] = lambda view: None
    views: list[View] = field(default_factory=list)

    def show(self, view: View) -> None:
        self.views.append(view)
        self.act(view)

    def close(self) -> None:
        """Nothing to leave."""


def toy_config(folder: Path, behaviours: list[str], **settings: float) -> RunConfig:
    supervisor = {"restart_backoff_s": 0.05, "drain_timeout_s": 5.0, **settings}
    return RunConfig(
        name="toys",
        run_dir=folder / "run",
        steps=10,
        groups_per_step=1,
        group_size=1,
        model=ModelConfig(path=folder),
        log=SqliteLogConfig(path=folder / "run" / "log"),
        operators={behaviour: RelayConfig() for behaviour in behaviours},
        supervisor=SupervisorConfig(**supervisor),
    )


def supervise(config: RunConfig, screen: Hook, pids: Path) -> Outcome:
    pids.mkdir(exist_ok=True)
    with RunFolder(config) as folder, closing(open_log(config.log, run_id=config.name)) as log:
        log.create_topics(topic_specs())
        folder.write_config(config)
        supervisor = Supervisor(
            config, folder, log, screen, command=lambda name, _: [sys.executable, str(TOY), name, str(pids)]
        )
        return supervisor.run()


def alive(pids: Path) -> list[int]:
    """The processes of the run that still exist (zombies do not count)."""
    found = []
    for path in pids.glob("*.pid"):
        try:
            state = Path(f"/proc/{path.stem}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(path.stem))
    return found


def wait_until(condition: Callable[[], bool], name: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{name}: not within {timeout_s} s"
        time.sleep(0.02)


if __name__ == "__main__":
    base = Path(sys.argv[1])
    sys.exit(supervise(toy_config(base, sys.argv[2:]), Hook(), base / "pids").exit_code)
