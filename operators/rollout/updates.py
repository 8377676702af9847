"""Which policy version the engine holds, and how it gets the next one.

Follows ``weights.versions``, asks the rule of ``round`` what to load, and does it: one attempt at a time, with the
deadlines of the configuration. Trajectories that wait for a version that cannot be had are handed back.

``pinned``: the weights are got when the engine is empty, in one call that waits for them. ``in_flight``: they are
brought near beside the sampling (``WeightSource.fetch``), and a load is planned once they are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laminar.operators.rollout.checked_engine import CheckedEngine
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.loader import Loader
from laminar.operators.rollout.round import Holding, takes_groups, version_to_load
from laminar.operators.rollout.version import Versions
from laminar.operators.rollout.work import Work
from laminar.operators.weights import WeightSource
from laminar.schemas.codec import Codec
from laminar.schemas.records import VersionManifest
from laminar.streams.log import Log

__all__ = ["Plan", "Updates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A version to load now."""

    manifest: VersionManifest
    is_old: bool
    """Not the newest: an adopted trajectory needs it."""


class Updates:
    """See the module's docstring. ``now`` is Unix epoch seconds."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        engine: CheckedEngine,
        work: Work,
        weights: WeightSource,
        log: Log,
        codec: Codec,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._top_up_lag = config.top_up_lag or (1 if config.updates == "pinned" else 2)
        self._engine = engine
        self._work = work
        self._versions = Versions(log, codec)
        self._loader = Loader(
            engine, weights, clock=clock, backoff_s=config.load_backoff_s, backoff_max_s=config.load_backoff_max_s
        )

    def poll(self) -> bool:
        """Read which versions there are."""
        return self._versions.poll()

    def takes_groups(self) -> bool:
        """Whether new groups may be taken under the version held."""
        return takes_groups(self._holding(), top_up_lag=self._top_up_lag)

    def plan(self, now: float) -> Plan | None:
        """What to load now; None: stay. Hands back what waits for a version that is not to be had."""
        if self._engine.out_of_service:
            self._work.hand_back_parked(None, now)
        holding = self._holding()
        wanted = version_to_load(holding)
        if wanted is None or not self._loader.is_due(wanted, now):
            return None
        if self._config.updates == "in_flight":
            return self._plan_in_flight(wanted, now)
        manifest = self._versions.get(wanted)
        is_old = wanted < holding.newest
        if manifest is None:
            if is_old:
                self._work.hand_back_parked(wanted, now)
            return None
        return Plan(manifest=manifest, is_old=is_old)

    def load(self, plan: Plan, now: float) -> bool:
        """Try once. Raises WeightsMismatch when the engine refuses the weights, EngineLost when it is lost."""
        config = self._config
        timeout_s = config.old_version_timeout_s if plan.is_old else config.load_timeout_s
        made_room = self._work.make_room(self._engine.asks(plan.manifest), now)
        if self._work.lost is not None:
            return False
        if self._work.lost is not None:
            return False
        loaded = self._loader.load(plan.manifest, now, timeout_s=timeout_s)
        if loaded or made_room:
            self._work.begin_parked(now)
        if not loaded and plan.is_old and self._loader.failures >= config.old_version_attempts:
            self._work.hand_back_parked(plan.manifest.version, now)
        return loaded

    def leaves_prompts(self, now: float) -> bool:
        """Whether every attempt has failed for longer than the lease, and no group may be taken before one does not."""
        return self._loader.failing_s(now) > self._config.lease_s and not self.takes_groups()

    def close(self) -> None:
        """Release the reader."""
        self._versions.close()

    def _plan_in_flight(self, wanted: int, now: float) -> Plan | None:
        manifest = self._versions.get(wanted)
        at_hand = self._loader.fetch(manifest, now) if manifest is not None else None
        if at_hand is None:
            if self._loader.failures >= self._config.old_version_attempts:
                self._work.hand_back_parked(None, now)
            return None
        return Plan(manifest=at_hand, is_old=False)

    def _holding(self) -> Holding:
        newest = self._versions.newest
        return Holding(
            version=self._engine.version,
            newest=newest.version if newest is not None else -1,
            sampling=self._work.ledger.sampling,
            answering=self._work.ledger.answering,
            parked=self._work.ledger.parked_versions,
            updates=self._config.updates,
        )
