"""Watches every record as it is committed, and knows what should stand in it.

It shares no code with the operators that it watches: what a trajectory's tokens are it asks the script, and who may say
what about a trajectory it folds by itself. Rules by name::

    admitted_twice, too_many_admitted     prompts
    lost_delta, wrong_tokens              a trajectory's tokens are the script's, each once, whoever sampled them
    two_versions, unpublished_version     committed ones, not below the prompt's least; pinned, and for an answer of an
                                          evaluation that stayed where it was, only one
    version_back, not_loaded              versions never decrease; a token's rollout had loaded its version
    two_owners, skipped_attempt           each owner has an attempt of its own, and they grow by one or two
    ended_twice, completed_twice, scored_twice, changed_by_reward
    outlived_its_lease                    a rollout that was silent for its lease goes on as a younger incarnation
    (course.py)                           what the trainer does
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.ledger import member_seed
from laminar.pipeline.simulation.course import Course
from laminar.pipeline.simulation.scenario import MAX_TOKENS, Scenario
from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens

__all__ = ["Witness"]


_LEASE_SLACK_S = 0.5
_MOVES: dict[r.MoveReason, str] = {
    "repack": "moves", "dead": "adoptions", "handback": "handbacks", "drain": "drained", "lost": "lost",
}  # fmt: skip


@dataclass(slots=True)
class _Member:
    prompt: r.Prompt
    ids: list[int]
    """Every token of its answer."""
    logprobs: list[float]
    attempt: int = -1
    """-1: not started."""
    n_known: int = 0
    owner: tuple[str, int] = ("", 0)
    ended: bool = False
    versions: list[int] = field(default_factory=list)
    """Of the tokens known."""
    completed: dict[int, r.CompletedTrajectory] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)


class Witness:
    """See the module's docstring. ``see`` is called once for each record, in the order of commits."""

    def __init__(self, scenario: Scenario, course: Course, report: Callable[[str, str], None]) -> None:
        """``report`` takes a rule and what is wrong."""
        self._scenario = scenario
        self._report = report
        self.course = course
        self.members: dict[str, _Member] = {}
        self._spoken: dict[str, r.RolloutStatus] = {}
        """The newest heartbeat of each rollout."""
        self._loaded: dict[str, set[int]] = {}
        """Versions that each rollout has ever held."""
        self.counts: Counter[str] = Counter()
        """What happened, for the coverage."""

    def see(self, record: r.Record) -> None:
        """The next record of the log."""
        match record:
            case r.Prompt():
                self._prompt(record)
            case r.TrajectoryStarted():
                self._started(record)
            case r.TrajectoryTokens():
                self._tokens(record)
            case r.TrajectoryMoved():
                self._moved(record)
            case r.AdoptCommand():
                self._adopt(record)
            case r.TrajectoryEnded():
                self._ended(record)
            case r.CompletedTrajectory():
                self._completed(record)
            case r.ScoredTrajectory():
                self._scored(record)
            case r.RolloutStatus():
                self._status(record)
            case r.DeadLetter():
                self.counts["dead letters"] += 1
                self.course.dead(record.trajectory_ids)
            case _:
                self.course.see(record)

    def loaded(self, rollout: str, version: int, *, busy: bool) -> None:
        """A rollout has loaded a version; ``busy``: with trajectories in its engine."""
        self._loaded.setdefault(rollout, set()).add(version)
        self.counts["loads under trajectories"] += busy
        if busy and self._scenario.updates == "pinned":
            self._report("two_versions", f"{rollout} loaded version {version} while it was sampling")

    def waiting(self) -> list[str]:
        """What is not settled, one line each, for the message of a run that does not end."""
        lines: list[str] = []
        for name, one in self.members.items():
            if name in self.course.settled:
                continue
            newest = max(one.completed, default=-1)
            where = "in prompts" if one.attempt < 0 else f"with {one.owner[0]}/{one.owner[1]}"
            if newest >= 0:
                where = "scored, with the trainer" if newest in one.scored else "completed, with reward"
            elif one.ended:
                where = "ended without a result"
            lines.append(f"{name}: attempt {one.attempt}, {one.n_known} of {len(one.ids)} tokens, {where}")
        return lines

    def _status(self, status: r.RolloutStatus) -> None:
        last = self._spoken.get(status.rollout_id)
        if last is not None and last.incarnation == status.incarnation:
            silent_s = (status.at_ms - last.at_ms) / 1000
            if silent_s > last.lease_s + _LEASE_SLACK_S:
                self._report("outlived_its_lease", f"{status.rollout_id} was silent for {silent_s:.1f} s and goes on")
        self._spoken[status.rollout_id] = status

    def _prompt(self, prompt: r.Prompt) -> None:
        if r.trajectory_id(prompt.prompt_id, 0) in self.members:
            self._report("admitted_twice", prompt.prompt_id)
            return
        names = []
        for member in range(prompt.group_size):
            name = r.trajectory_id(prompt.prompt_id, member)
            answer = self._scenario.answer(
                EngineRequest(
                    trajectory_id=name,
                    prompt_ids=(),
                    sampling=prompt.sampling,
                    seed=member_seed(prompt.seed, member),
                )
            )
            assert isinstance(answer.logprobs, tuple)
            self.members[name] = _Member(prompt, list(answer.ids[:MAX_TOKENS]), list(answer.logprobs[:MAX_TOKENS]))
            names.append(name)
        self.course.admitted(prompt, names)

    def _member(self, name: str, what: str) -> _Member | None:
        known = self.members.get(name)
        if known is None:
            self._report("not_admitted", f"{what} of {name}")
        return known

    def _started(self, event: r.TrajectoryStarted) -> None:
        known = self._member(event.trajectory_id, "Started")
        if known is None:
            return
        if event.attempt <= known.attempt:
            self._report("two_owners", f"{event.trajectory_id}: Started again, attempt {event.attempt}")
        known.attempt, known.owner, known.n_known = event.attempt, (event.rollout_id, event.incarnation), 0
        known.versions.clear()

    def _tokens(self, event: r.TrajectoryTokens) -> None:
        known = self._member(event.trajectory_id, "Tokens")
        if known is None:
            return
        if event.attempt < known.attempt or known.ended:
            self.counts["late deltas"] += 1
            return
        if event.attempt > known.attempt:
            self._report("skipped_attempt", f"{event.trajectory_id}: Tokens of attempt {event.attempt}")
        if event.start != known.n_known:
            self._report(
                "lost_delta", f"{event.trajectory_id}: tokens from {event.start} on, {known.n_known} were known"
            )
        self._compare(event.trajectory_id, known, event.start, event.tokens)
        known.n_known = event.start + event.tokens.n_tokens
        known.versions[event.start :] = event.tokens.versions_T.tolist()
        self._sampled(event.trajectory_id, known, event.start)

    def _compare(self, name: str, known: _Member, start: int, tokens: Tokens) -> None:
        end = start + tokens.n_tokens
        if tokens.ids_T.tolist() != known.ids[start:end] or tokens.logprobs_T.tolist() != known.logprobs[start:end]:
            self._report("wrong_tokens", f"{name}: [{start}:{end}] is not what the engine says")

    def _sampled(self, name: str, known: _Member, start: int) -> None:
        """Its owner has sampled the tokens from here on."""
        before = known.versions[start - 1] if start else 0
        for at, version in enumerate(known.versions[start:], start):
            if version < before:
                self._report("version_back", f"{name}: token {at} is of version {version} after {before}")
            if version not in self._loaded.get(known.owner[0], ()):
                self._report("not_loaded", f"{name}: token {at} is of version {version}, {known.owner[0]} never had it")
            before = version

    def _moved(self, event: r.TrajectoryMoved) -> None:
        known = self._member(event.trajectory_id, "Moved")
        if known is None:
            return
        target = (event.to_rollout, event.to_incarnation)
        if event.attempt <= known.attempt:
            self.counts["late moves"] += 1
            if event.attempt == known.attempt and target != known.owner and event.to_incarnation:
                self._report(
                    "two_owners", f"{event.trajectory_id}: attempt {event.attempt} is with {known.owner} and {target}"
                )
            return
        if event.attempt > known.attempt + (2 if event.reason == "dead" else 1):
            self._report("skipped_attempt", f"{event.trajectory_id}: {known.attempt} to {event.attempt}")
        if event.n_tokens > known.n_known or (event.reason != "dead" and event.n_tokens != known.n_known):
            self._report(
                "lost_delta", f"{event.trajectory_id}: moved with {event.n_tokens} tokens, {known.n_known} are known"
            )
        self.counts[_MOVES[event.reason]] += 1
        if known.n_known and not event.n_tokens:
            self.counts["sampled anew"] += 1
        if known.ended:  # repack could not see the end yet: sampled once more, and one of the two results counts
            self.counts["moved after the end"] += 1
            known.ended = False
        known.attempt, known.owner, known.n_known = event.attempt, target, event.n_tokens
        del known.versions[event.n_tokens :]

    def _adopt(self, command: r.AdoptCommand) -> None:
        shot = command.snapshot
        known = self._member(shot.trajectory_id, "Adopt")
        if known is None:
            return
        self._compare(shot.trajectory_id, known, 0, shot.response)
        if (
            shot.attempt == known.attempt
            and not known.ended
            and (command.rollout_id, command.incarnation) != known.owner
        ):
            self._report("two_owners", f"{shot.trajectory_id}: {known.owner}, and Adopt to {command.rollout_id}")

    def _ended(self, event: r.TrajectoryEnded) -> None:
        known = self._member(event.trajectory_id, "Ended")
        if known is None:
            return
        if event.attempt < known.attempt:
            self.counts["late ends"] += 1
            return
        if event.attempt > known.attempt:
            self._report("skipped_attempt", f"{event.trajectory_id}: Ended at attempt {event.attempt}")
        if known.ended:
            self._report("ended_twice", f"{event.trajectory_id}: attempt {event.attempt}")
        known.ended = True

    def _completed(self, made: r.CompletedTrajectory) -> None:
        name = made.trajectory_id
        known = self._member(name, "Completed")
        if known is None:
            return
        if made.attempt in known.completed:
            self._report("completed_twice", f"{name}: attempt {made.attempt}")
        known.completed[made.attempt] = made
        self._compare(name, known, 0, made.response)
        if made.response.n_tokens != len(known.ids):
            self._report("wrong_tokens", f"{name}: {made.response.n_tokens} tokens of {len(known.ids)}")
        if made.attempt == known.attempt:
            known.versions[known.n_known :] = made.response.versions_T[known.n_known :].tolist()
            self._sampled(name, known, known.n_known)
            if known.versions != made.response.versions_T.tolist():
                self._report(
                    "version_back", f"{name}: {made.response.versions_T.tolist()}, known were {known.versions}"
                )
        versions = sorted(set(made.response.versions_T.tolist()))
        alone = self._scenario.updates == "pinned" or (made.prompt.purpose == "eval" and not made.timings.moves)
        self.counts["trajectories of several versions"] += len(versions) > 1
        if (alone and len(versions) != 1) or (made.version_min, made.version_max) != (versions[0], versions[-1]):
            self._report("two_versions", f"{name}: {versions}, said to be {made.version_min} to {made.version_max}")
        if not self.course.published.issuperset(versions) or versions[0] < made.prompt.min_version:
            self._report("unpublished_version", f"{name}: versions {versions}, at least {made.prompt.min_version}")

    def _scored(self, scored: r.ScoredTrajectory) -> None:
        made = scored.trajectory
        known = self._member(made.trajectory_id, "Scored")
        if known is None:
            return
        if made.attempt in known.scored:
            self._report("scored_twice", f"{made.trajectory_id}: attempt {made.attempt}")
        known.scored.add(made.attempt)
        if known.completed.get(made.attempt) != made:
            self._report("changed_by_reward", f"{made.trajectory_id}: attempt {made.attempt}")
