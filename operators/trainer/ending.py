"""When a run ends, and why: pure decisions, but for the clock that an overdue evaluation is measured by.

A run ends after its last step, or when there are no more groups. Evaluation rounds that have begun, or must come, are
waited for, each next answer of theirs for ``final_evaluation_timeout_s``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from laminar.operators.operator import RunInfo
from laminar.operators.trainer.batch import Assembly
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.history import History
from laminar.streams.deadline import Deadline

__all__ = ["Ending", "exhausted"]

logger = logging.getLogger(__name__)


def exhausted(history: History, assembly: Assembly, n: int = 0) -> bool:
    """Whether every training group that there will ever be is done, but for ``n``."""
    groups = history.exhausted_groups
    return groups is not None and len(assembly.done) + len(assembly.lost) + n >= groups


class Ending:
    """Of one run, as one process sees it."""

    def __init__(self, run: RunInfo, config: TrainerConfig, clock: Callable[[], float]) -> None:
        self._run = run
        self._config = config
        self._clock = clock
        self._deadline: Deadline | None = None
        self._settled = 0
        """Members of the awaited rounds that were settled when the deadline began."""

    def reason(self, step: int, history: History, assembly: Assembly) -> str | None:
        """Why the run ends after this step; None: answers are still waited for."""
        reason = f"all {self._run.steps} steps are done"
        if step < self._run.steps and exhausted(history, assembly):
            reason = f"data exhausted at step {step}"
        awaited = self._awaited(history, assembly)
        if not awaited:
            return reason
        deadline = self._next_answer(awaited, assembly)
        if not deadline.passed:
            return None
        there = "; ".join(_answers(number, assembly) for number in awaited)
        reason += f"; {deadline.exceeded(there)}"
        logger.warning("the run ends with an incomplete evaluation: %s", reason)
        return reason

    def rounds(self, history: History, assembly: Assembly) -> list[int]:
        """Evaluation rounds whose results are to be written at the end, complete or not."""
        found = set(self._awaited(history, assembly))
        if self._run.final_round not in history.evaluated and self._evaluates(history, assembly):
            found.add(self._run.final_round)
        return sorted(found)

    def _awaited(self, history: History, assembly: Assembly) -> list[int]:
        """Rounds that have begun, or must come, and lack answers."""
        found = [number for number, known in assembly.rounds.items() if not known.complete]
        if self._evaluates(history, assembly):
            must = {0, self._run.final_round} - history.evaluated - assembly.rounds.keys()
            found += sorted(must)  # the first may have begun without an answer so far
        return found

    def _next_answer(self, awaited: list[int], assembly: Assembly) -> Deadline:
        rounds = assembly.rounds
        settled = sum(len(rounds[n].answers) + len(rounds[n].dead) for n in awaited if n in rounds)
        if self._deadline is None or settled != self._settled:
            self._settled = settled
            self._deadline = Deadline.after(
                self._config.final_evaluation_timeout_s, "last evaluation round", self._clock
            )
        return self._deadline

    def _evaluates(self, history: History, assembly: Assembly) -> bool:
        if self._config.final_evaluation is not None:
            return self._config.final_evaluation
        return bool(history.evaluated or assembly.rounds)


def _answers(number: int, assembly: Assembly) -> str:
    known = assembly.rounds.get(number)
    return f"round {number}: " + (f"{len(known.answers)} of {known.size} answers" if known else "no answer")
