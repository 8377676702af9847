"""The audit's state: records in, in any order of the partitions, a ledger out at any time.

Guarantees:

* The ledger is a function of what was read of each partition, not of how the partitions were interleaved.
* A member is kept while it is in flight, while a recent step that settled it may still be taken back, and for good
  where something is wrong with it, or a dead letter is its fate. All others are a byte each (``settled``).
* A record about a member that was put away takes nothing for granted: the member stands in ``reopened`` until its
  records have been read again (``restore``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from laminar.schemas import records as r
from laminar.schemas.errors import DecodeError
from laminar.streams.audit.letters import LetterBook
from laminar.streams.audit.member import Member, Owner, Resolution, Result, apply_event
from laminar.streams.audit.peek import Admitted, Adopted, Delta, Done, Manifest, Peek, Scored, Started
from laminar.streams.audit.rules import View, findings
from laminar.streams.audit.settled import MANY, Settled
from laminar.streams.audit.steps import StepBook
from laminar.streams.audit.versions import VersionBook
from laminar.streams.dead_letter import RETRY_OF
from laminar.streams.ledger import Place, Violation
from laminar.streams.log import LogRecord

__all__ = ["Fold"]

_LETTER = re.compile(rb"dead\.letters\[\d+\]@\d+")


def _never(_: object) -> bool:
    return False


class Fold:
    """See the module's docstring."""

    def __init__(
        self,
        peek: Peek,
        run_id: str,
        *,
        max_staleness: int | None = None,
        gone: frozenset[str] = frozenset(),
        window: int | None = 16,
        only: Collection[str] | None = None,
        keep_above: int | None = None,
    ) -> None:
        """``gone``: topics whose beginning is gone; ``window``: steps that are kept with what they settled (None: all);
        ``only``: the members to keep (None: all); ``keep_above``: steps that never leave the window."""
        self.run_id = run_id
        self.max_staleness = max_staleness
        self.gone = gone
        self.members: dict[str, Member] = {}
        self.reopened: set[str] = set()
        """Put away too early, or so it seems."""
        self.urgent = False
        """One of them was settled again, which is wrong unless the trainer has resumed."""
        self.letters = LetterBook()
        self.versions = VersionBook()
        self.steps = StepBook(
            run_id,
            window=window if window is not None else 2**62,
            keep_above=keep_above,
            lenient="training.steps" in gone,
        )
        self.settled = Settled()
        self.settled_fates: Counter[str] = Counter()
        self.settled_late: dict[str, int] = {}
        """Of those put away: ends that nobody waited for any more."""
        self.unreadable: dict[Place, tuple[str, str]] = {}
        """Where bytes stand that are no record -> their key, and why."""
        self.faults: list[Violation] = []
        self.max_versions = 0
        """In one trajectory."""
        self.n_sampled = self.n_versions = 0
        """Results with tokens, and the versions in them, added up."""
        self._peek = peek
        self._only = frozenset(only) if only is not None else None
        self._lenient = "trajectories.partial" in gone
        self._view = self.view()
        self._handlers: Mapping[type, Callable[[Place, object, LogRecord], None]] = {
            Admitted: self._admitted,
            Started: self._event,
            Delta: self._event,
            r.TrajectoryMoved: self._event,
            r.TrajectoryEnded: self._event,
            Adopted: self._adopted,
            Done: self._completed,
            Scored: self._scored,
            Manifest: self._manifest,
            r.DeadLetter: self._letter,
            r.DeadLetterSettled: self._decided,
            r.OffsetsSkipped: self._jumped,
            r.TrainerStarted: self._training,
            r.TrainingStep: self._training,
            r.Evaluation: self._training,
            r.RunEnded: self._training,
        }

    def apply(self, record: LogRecord) -> None:
        """Take the next record of its partition."""
        place = Place(record.topic, record.partition, record.offset)
        for name, value in record.headers:
            if name == RETRY_OF and _LETTER.fullmatch(value):
                self.letters.stands_again(place, value.decode())
        try:
            seen = self._peek.read(record.value or b"", record.topic)
        except DecodeError as error:
            self.unreadable[place] = (record.key or b"").decode("utf-8", "replace"), str(error)
            return
        handler = self._handlers.get(type(seen))
        if handler is not None:
            handler(place, seen, record)

    def view(
        self,
        old: Callable[[Place], bool] = _never,
        passed: Callable[[Place], bool] = _never,
        unsettled: Callable[[Member, Place], bool] = lambda *_: False,
    ) -> View:
        """What members are judged by."""
        return View(
            old=old,
            passed=passed,
            unsettled=unsettled,
            letters=self.letters,
            versions=self.versions,
            made=self.steps.made,
            max_staleness=self.max_staleness,
            gone=self.gone,
        )

    def restore(self, again: Fold, *, steps: bool) -> None:
        """Take the reopened members, as ``again`` has read them up to the same positions; ``steps``: its steps too."""
        if steps:
            surviving = {one.place for one in again.steps.window}
            self.steps = again.steps
            self._view = self.view()
            for member in self.members.values():
                member.resolutions = tuple(
                    one for one in member.resolutions if one.version < 0 or not self._voided(one, surviving)
                )
        recent = {one.place for one in self.steps.window}
        reopened, self.reopened, self.urgent = self.reopened, set(), False
        for trajectory_id in reopened:
            fate = self.settled.get(trajectory_id)
            if fate is not None:
                self.settled.remove(trajectory_id)
                self.settled_fates[fate.name] -= 1
                self.settled_late.pop(trajectory_id, None)
            found = again.members.get(trajectory_id)
            if found is None:
                continue
            found.letters = tuple(self.letters.by_place[one.place] for one in found.letters)
            found.firm = bool(found.resolutions) and all(
                one.version < 0 or one.place not in recent for one in found.resolutions
            )
            self.members[trajectory_id] = found
            self._touched(trajectory_id, found)

    def _voided(self, resolution: Resolution, surviving: Collection[Place]) -> bool:
        """Whether a step that the book has in full, or has dropped, is not among those that count."""
        evicted = self.steps.evicted
        return resolution.place not in surviving and (evicted is None or resolution.place > evicted.place)

    # -- members

    def _member(self, trajectory_id: str) -> Member | None:
        """Its entry, made when it is new; None: it is of no interest, or put away."""
        found = self.members.get(trajectory_id)
        if found is not None:
            return found
        if self._only is not None and trajectory_id not in self._only:
            return None
        if trajectory_id in self.reopened:
            return None
        if self.settled.get(trajectory_id) is not None:
            self.reopened.add(trajectory_id)
            return None
        made = self.members[trajectory_id] = Member()
        return made

    def _touched(self, trajectory_id: str, member: Member) -> None:
        """Put it away when nothing is expected of it any more."""
        if not member.firm or member.letters or member.faults or len(member.resolutions) != 1:
            return
        if self._only is not None:
            return
        if member.end is None or member.end.attempt < member.attempt:
            return  # a newer owner is still at work
        if not (self.gone or (member.prompts and member.completed and member.scored)):
            return
        if next(findings(member, self._view), None) is not None:
            return
        name = member.resolutions[0].reason or "trained"
        self.settled.add(trajectory_id, name, member.attempt, member.group_size)
        self.settled_fates[name] += 1
        if member.late:
            self.settled_late[trajectory_id] = member.late
        del self.members[trajectory_id]

    # -- records

    def _admitted(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, Admitted)
        for number in range(seen.group_size):
            trajectory_id = r.trajectory_id(seen.prompt_id, number)
            member = self._member(trajectory_id)
            if member is None:
                continue
            member.prompts = (*member.prompts, place)
            member.train, member.round, member.round_size = seen.train, seen.round, seen.round_size
            member.min_version, member.group_size = seen.min_version, seen.group_size
            self._touched(trajectory_id, member)

    def _event(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, Started | Delta | r.TrajectoryMoved | r.TrajectoryEnded)
        member = self.members.get(seen.trajectory_id)
        if member is None:
            if isinstance(seen, Delta):
                fate = self.settled.get(seen.trajectory_id)
                if fate is not None and seen.attempt < fate.attempt < MANY:
                    return  # a zombie's
            member = self._member(seen.trajectory_id)
            if member is None:
                return
        apply_event(seen.trajectory_id, member, seen, place, lenient=self._lenient)
        if member.firm:
            self._touched(seen.trajectory_id, member)

    def _adopted(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, Adopted)
        member = self._member(seen.trajectory_id)
        if member is not None:
            owner = Owner(seen.attempt, seen.rollout_id, seen.incarnation, place)
            member.adopts = (*member.adopts, owner)
            self._touched(seen.trajectory_id, member)

    def _completed(self, place: Place, seen: object, record: LogRecord) -> None:
        assert isinstance(seen, Done)
        if seen.version_min == seen.version_max and seen.n_tokens:
            self._count_versions(1)
        member = self._member(seen.trajectory_id)
        if member is None:
            return
        member.completed = (*member.completed, Result(seen, place))
        if seen.version_min != seen.version_max:
            self._versions(place, seen, member, record)
        self._touched(seen.trajectory_id, member)

    def _versions(self, place: Place, seen: Done, member: Member, record: LogRecord) -> None:
        whole = self._peek.whole(record.value or b"")
        assert isinstance(whole, r.CompletedTrajectory)
        versions = whole.response.versions_T[whole.response.mask_T == 1].tolist()
        self._count_versions(len(set(versions)))
        if versions != sorted(versions):
            at = next(i for i in range(1, len(versions)) if versions[i] < versions[i - 1])
            detail = f"token {at} was sampled by version {versions[at]}, the one before it by {versions[at - 1]}"
            member.faults.append(
                Violation(
                    kind="version_back",
                    trajectory_id=seen.trajectory_id,
                    place=str(place),
                    detail=detail,
                    places=(str(place),),
                )
            )

    def _count_versions(self, n: int) -> None:
        self.max_versions = max(self.max_versions, n)
        self.n_sampled += 1
        self.n_versions += n

    def _scored(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, Scored)
        member = self._member(seen.done.trajectory_id)
        if member is not None:
            known = next((one.done for one in member.completed if one.done == seen.done), seen.done)
            member.scored = (*member.scored, Result(known, place))
            self._touched(seen.done.trajectory_id, member)

    def _manifest(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, Manifest)
        if seen.run_id == self.run_id:
            self.versions.manifest(place, seen)

    def _letter(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, r.DeadLetter)
        letter = self.letters.letter(place, seen)
        for trajectory_id in letter.trajectory_ids:
            member = self._member(trajectory_id)
            if member is not None:
                member.letters = (*member.letters, letter)

    def _decided(self, place: Place, seen: object, _: LogRecord) -> None:
        assert isinstance(seen, r.DeadLetterSettled)
        self.letters.settle(place, seen)

    def _jumped(self, _: Place, seen: object, __: LogRecord) -> None:
        assert isinstance(seen, r.OffsetsSkipped)
        self.letters.skip(seen)

    def _training(self, place: Place, seen: object, _: LogRecord) -> None:
        change = self.steps.apply(place, seen)
        for step in change.voided:
            for trajectory_id, resolution in step.settled:
                member = self.members.get(trajectory_id)
                if member is not None:
                    member.resolutions = tuple(one for one in member.resolutions if one.place != resolution.place)
                elif self.settled.get(trajectory_id) is not None:
                    self.reopened.add(trajectory_id)
        for trajectory_id, resolution in change.settled:
            member = self._member(trajectory_id)
            if member is None:
                self.urgent = self.urgent or trajectory_id in self.reopened
            else:
                member.resolutions = (*member.resolutions, resolution)
                if change.for_good:
                    member.firm = True
                    self._touched(trajectory_id, member)
        for step in change.firm:
            for trajectory_id, _resolution in step.settled:
                member = self.members.get(trajectory_id)
                if member is not None:
                    member.firm = True
                    self._touched(trajectory_id, member)
