"""Reward functions that behave badly, for the pool's tests: each does what the trajectory's text says."""

from __future__ import annotations

import os
import random
import re
import signal
import time

from laminar.operators.reward.functions import Score
from laminar.schemas.records import CompletedTrajectory


def obey(trajectory: CompletedTrajectory, *, scale: float = 1.0) -> object:
    match trajectory.text.split():
        case ["return", number]:
            return scale * float(number)
        case ["none"]:
            return None
        case ["text"]:
            return "good"
        case ["raise"]:
            raise ConnectionError("the judge is away")
        case ["exit"]:
            os._exit(3)
        case ["segfault"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return 1.0
        case ["regex"]:  # holds the interpreter for ever, as a pathological expression in a math verifier does
            return re.match(r"(a+)+$", "a" * 64 + "b") is not None
        case ["once", path]:
            if not os.path.exists(path):
                open(path, "w").close()
                raise ConnectionError("try again")
            return 1.0
        case ["pid"]:
            print("a function may print")  # noqa: T201
            return Score(reward=1.0, components={"half": 0.5}, meta={"pid": str(os.getpid())})
    raise AssertionError(trajectory.text)


def nap(trajectory: CompletedTrajectory, *, longest_s: float = 0.3) -> float:
    """Takes a time of its own for each trajectory, the same in every attempt."""
    time.sleep(longest_s * random.Random(trajectory.trajectory_id).random() ** 3)
    return 1.0


NOT_CALLABLE = 5
