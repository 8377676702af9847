"""The trajectories that a rollout owns, with everything sampled so far.

Tokens of a trajectory are *settled* (in the log, or in the outbox on their way to it) or *fresh*. A delta takes the
fresh ones exactly once, so no token is lost or written twice.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from laminar.schemas import records as r
from laminar.schemas.tokens import EMPTY, Tokens, ids_view

__all__ = ["Ledger", "Owned", "member_seed"]

_REMEMBERED = 20_000


def member_seed(seed: int, member: int) -> int:
    """A member's seed from its group's base seed; below 2**62. An engine adds the number of tokens so far."""
    digest = hashlib.blake2b(f"{seed}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@dataclass(slots=True, eq=False)
class Owned:
    """One trajectory in hand."""

    trajectory_id: str
    attempt: int
    member: int
    prompt: r.Prompt
    prompt_ids: tuple[int, ...]
    seed: int
    started_ms: int
    first_token_ms: int = 0
    moves: int = 0
    tries: int = 0
    """How often it failed here."""
    in_engine: bool = False
    """False: parked until a version that it may go on under is loaded."""
    n_settled: int = 0
    n_fresh: int = 0
    _settled: list[Tokens] = field(default_factory=list)
    _fresh: list[Tokens] = field(default_factory=list)
    _whole: Tokens | None = None
    """All of them as one, while they are the same."""

    @classmethod
    def started(cls, prompt: r.Prompt, *, at_ms: int) -> list[Owned]:
        """All members of a group that is taken now."""
        ids = tuple(ids_view(prompt.prompt_tokens).tolist())
        return [
            cls(
                trajectory_id=r.trajectory_id(prompt.prompt_id, member),
                attempt=0,
                member=member,
                prompt=prompt,
                prompt_ids=ids,
                seed=member_seed(prompt.seed, member),
                started_ms=at_ms,
            )
            for member in range(prompt.group_size)
        ]

    @classmethod
    def adopted(cls, snapshot: r.Snapshot) -> Owned:
        """A trajectory that another rollout began."""
        made = cls(
            trajectory_id=snapshot.trajectory_id,
            attempt=snapshot.attempt,
            member=snapshot.member,
            prompt=snapshot.prompt,
            prompt_ids=tuple(ids_view(snapshot.prompt.prompt_tokens).tolist()),
            seed=snapshot.seed,
            started_ms=snapshot.timings.started_ms,
            first_token_ms=snapshot.timings.first_token_ms,
            moves=snapshot.timings.moves,
        )
        if snapshot.response.n_tokens:
            made._settled.append(snapshot.response)
            made.n_settled = snapshot.response.n_tokens
        return made

    @property
    def n_response(self) -> int:
        """Response tokens."""
        return self.n_settled + self.n_fresh

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens: what it needs of the KV cache."""
        return len(self.prompt_ids) + self.n_response

    @property
    def version(self) -> int:
        """The policy version of its last token, to which it is pinned where versions are; -1 while there are none."""
        parts = self._fresh or self._settled
        return int(parts[-1].versions_T[-1]) if parts else -1

    def add(self, tokens: Tokens) -> None:
        """Take newly sampled tokens."""
        if tokens.n_tokens:
            self._fresh.append(tokens)
            self.n_fresh += tokens.n_tokens
            self._whole = None

    def fresh(self) -> Tokens:
        """Tokens that no delta has taken yet."""
        return _joined(self._fresh)

    def settle(self) -> None:
        """The fresh tokens are on their way to the log."""
        self._settled.extend(self._fresh)
        self.n_settled += self.n_fresh
        self._fresh = []
        self.n_fresh = 0
        self._whole = None

    def drop_fresh(self) -> None:
        """Forget tokens that the log must not see."""
        self._fresh = []
        self.n_fresh = 0
        self._whole = None

    def response(self) -> Tokens:
        """Everything sampled so far."""
        if not self._fresh:
            return _joined(self._settled)
        whole = self._whole
        if whole is None:
            whole = self._whole = Tokens.concat([*self._settled, *self._fresh])
        return whole

    def snapshot(self, *, version: int) -> r.Snapshot:
        """What the next owner needs. ``version``: what it is to be sampled with while it has no token."""
        return r.Snapshot(
            trajectory_id=self.trajectory_id,
            attempt=self.attempt + 1,
            member=self.member,
            prompt=self.prompt,
            response=self.response(),
            version=self.version if self.n_response else version,
            seed=self.seed,
            timings=self.timings(moves=self.moves + 1),
        )

    def timings(self, *, ended_ms: int = 0, moves: int | None = None) -> r.Timings:
        """When it passed each stage."""
        return r.Timings(
            admitted_ms=self.prompt.created_ms,
            started_ms=self.started_ms,
            first_token_ms=self.first_token_ms,
            ended_ms=ended_ms,
            moves=self.moves if moves is None else moves,
        )


def _joined(parts: list[Tokens]) -> Tokens:
    """The parts as one; the list is left with one part, so that joining again costs nothing."""
    if len(parts) > 1:
        parts[:] = [Tokens.concat(parts)]
    return parts[0] if parts else EMPTY


class Ledger:
    """What is in hand, and which attempts of what left are void."""

    def __init__(self) -> None:
        self._owned: dict[str, Owned] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[Owned]:
        return iter(list(self._owned.values()))

    def get(self, trajectory_id: str) -> Owned | None:
        """One in hand."""
        return self._owned.get(trajectory_id)

    def add(self, owned: Owned) -> None:
        """Take one in hand."""
        self._owned[owned.trajectory_id] = owned

    def remove(self, owned: Owned, attempt: int) -> None:
        """It left; commands about it up to this attempt are void from here on."""
        self._owned.pop(owned.trajectory_id, None)
        self._gone[owned.trajectory_id] = attempt
        self._gone.move_to_end(owned.trajectory_id)
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def is_void(self, trajectory_id: str, attempt: int) -> bool:
        """Whether a command for this attempt is a duplicate or comes too late."""
        owned = self._owned.get(trajectory_id)
        known = owned.attempt if owned is not None else self._gone.get(trajectory_id, -1)
        return attempt <= known

    def clear(self) -> None:
        """Forget what is in hand."""
        self._owned.clear()

    @property
    def sampling(self) -> int:
        """How many are in the engine."""
        return sum(one.in_engine for one in self._owned.values())

    @property
    def answering(self) -> int:
        """How many of them are answers of an evaluation."""
        return sum(one.in_engine and one.prompt.purpose == "eval" for one in self._owned.values())

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens of all."""
        return sum(one.n_tokens for one in self._owned.values())

    @property
    def parked_versions(self) -> tuple[int, ...]:
        """Versions that parked trajectories are pinned to, ascending."""
        return tuple(sorted({o.version for o in self._owned.values() if not o.in_engine and o.n_response}))
