"""A trajectory that kills its owners ends as a dead letter, and those beside it do not; clocks that are set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laminar.operators.repack.config import RepackConfig
from laminar.operators.repack.fold import PartialPool
from laminar.operators.repack.operator import Repack
from laminar.operators.repack.policy import Load, Orphan, place
from laminar.operators.repack.verdict import deaths_by_now
from laminar.schemas import records as r
from laminar.streams.log import TopicPartition
from tests.support.dataflow import World, make_prompt
from tests.unit.operators.repack.test_repack_operator import CONFIG, delta, heartbeat, run, started

ROLLOUTS = ("r0", "r1", "r2")


class Cluster:
    """Rollouts that die, each time anew, with the trajectories in ``poison`` in hand; everything else they finish."""

    def __init__(self, world: World, poison: frozenset[str], *, patience: int = 3) -> None:
        self.world = world
        self.poison = poison
        self.patience = patience
        """Rounds that an innocent trajectory takes."""
        self.incarnations = dict.fromkeys(ROLLOUTS, 1)
        self.held: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in ROLLOUTS}
        """Rollout -> trajectory -> (attempt, rounds left)."""
        self.ended: set[str] = set()
        self.beside: list[frozenset[str]] = []
        """What each rollout that died had in hand."""
        self._read = 0

    def start(self, rollout: str, members: range) -> None:
        group = make_prompt(group_size=8)
        begun = (replace(started(self.world, 0, rollout), member=n, prompt=group) for n in members)
        self.world.write(*(replace(one, trajectory_id=r.trajectory_id(group.prompt_id, one.member)) for one in begun))
        for member in members:
            self.held[rollout][r.trajectory_id(make_prompt().prompt_id, member)] = (0, self.patience)

    def round(self) -> None:
        commands = self.world.read("rollouts.commands", r.AdoptCommand)
        for command in commands[self._read :]:
            if self.incarnations[command.rollout_id] == command.incarnation:
                snapshot = command.snapshot
                self.held[command.rollout_id][snapshot.trajectory_id] = (snapshot.attempt, self.patience)
        self._read = len(commands)
        for name in ROLLOUTS:
            if self.poison & self.held[name].keys():
                self.beside.append(frozenset(self.held[name]))
                self.held[name].clear()
                self.incarnations[name] += 1
            for trajectory, (attempt, left) in list(self.held[name].items()):
                if left:
                    self.held[name][trajectory] = (attempt, left - 1)
                    continue
                del self.held[name][trajectory]
                self.ended.add(trajectory)
                self.world.write(
                    r.TrajectoryEnded(trajectory_id=trajectory, attempt=attempt, finish="stop", n_tokens=1, at_ms=0)
                )
            beat = heartbeat(self.world, name, tuple(self.held[name]), incarnation=self.incarnations[name])
            self.world.write(beat)


def live(world: World, operator: Repack, cluster: Cluster, until: Callable[[], bool], rounds: int = 200) -> None:
    for _ in range(rounds):
        cluster.round()
        while operator.step(world.now):
            pass
        world.advance(0.25)
        if until():
            return
    raise AssertionError(f"not within {rounds} rounds: held {cluster.held}")


def test_a_trajectory_that_kills_each_owner_is_buried_and_those_beside_it_are_finished() -> None:
    world = World(group_size=8)
    operator = Repack(RepackConfig(period_s=1.0, dead_after_s=3.0), world.context("repack"))
    poison = "d/0/0/3"
    cluster = Cluster(world, frozenset({poison}))
    cluster.start("r0", range(8))
    innocent = {f"d/0/0/{member}" for member in range(8)} - {poison}
    live(world, operator, cluster, lambda: cluster.ended == innocent and operator.burials == 1)
    letters = world.read("dead.letters", r.DeadLetter)
    assert [(one.trajectory_ids, one.group_id, one.kind) for one in letters] == [((poison,), "d/0/0", "OwnersDied")]
    assert "3 rollouts died" in letters[0].error
    (end,) = [e for e in world.read("trajectories.partial", r.TrajectoryEnded) if e.trajectory_id == poison]
    moves = [m for m in world.read("trajectories.partial", r.TrajectoryMoved) if m.trajectory_id == poison]
    assert (end.finish, end.attempt) == (None, max(move.attempt for move in moves))
    assert len(cluster.beside) == 3
    assert len(cluster.beside[0]) == 8


def test_of_two_poisonous_trajectories_each_is_judged_alone() -> None:
    world = World(group_size=8)
    operator = Repack(RepackConfig(period_s=1.0, dead_after_s=3.0), world.context("repack"))
    poison = frozenset({"d/0/0/3", "d/0/0/4"})
    cluster = Cluster(world, poison)
    cluster.start("r0", range(8))
    live(world, operator, cluster, lambda: operator.burials == 2 and len(cluster.ended) == 6)
    assert {one.trajectory_ids[0] for one in world.read("dead.letters", r.DeadLetter)} == poison


def test_one_that_gets_further_under_each_owner_that_dies_is_innocent() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"), heartbeat(world, "r0", incarnation=1))
    attempt = 0
    for length in range(6):
        world.write(delta(world, "d/0/0/0", length, 1, attempt))
        world.write(heartbeat(world, "r0", incarnation=2 + length))
        while operator.step(world.now):
            pass
        world.advance(0.5)
        attempt = world.read("rollouts.commands", r.AdoptCommand)[-1].snapshot.attempt
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 6
    assert world.read("dead.letters", r.DeadLetter) == []


def test_one_that_kills_at_the_same_token_each_time_is_buried_though_it_is_sampled_anew() -> None:
    source = TopicPartition("trajectories.partial", 0)
    pool, world = PartialPool(), World()
    pool.apply(started(world, 0, "r0"), source, 0)
    one = pool.alive["d/0/0/0"]
    judged = []
    for attempt in range(1, 5):
        pool.apply(delta(world, one.trajectory_id, 0, 4, one.attempt), source, attempt)
        judged.append(deaths_by_now(one))
        moved = r.TrajectoryMoved(
            trajectory_id=one.trajectory_id, attempt=attempt, reason="dead", from_rollout="r0", to_rollout="r0",
            to_incarnation=attempt + 1, n_tokens=0, at_ms=0,
        )  # fmt: skip
        pool.apply(moved, source, attempt)
    assert judged == [0, 1, 2, 3]


def test_suspects_wait_rather_than_share_a_rollout() -> None:
    loads = [Load(name, 1, version=1, kv_used=0, kv_max=9, running=0, waiting=0, max_running=8) for name in ("a", "b")]
    orphans = [Orphan(str(n), -1, 10, 0.0, 0, suspect=n < 3) for n in range(4)]
    placed = {one.trajectory_id: one.rollout_id for one in place(orphans, loads, version_wait_s=1.0, guarded={"a"})}
    assert placed.keys() == {"0", "3"}
    assert placed["0"] == "b"


def test_what_was_handed_back_has_no_dead_owner() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(started(world, 0, "r0"))
    for attempt in range(1, 12, 3):  # taken back by each owner that lives
        moved = r.TrajectoryMoved(
            trajectory_id="d/0/0/0", attempt=attempt, reason="handback", from_rollout="r0", to_rollout="r0",
            to_incarnation=0, n_tokens=0, at_ms=0,
        )  # fmt: skip
        world.write(moved)
        run(world, operator, 0.5, {"r0": ()})
    assert world.read("dead.letters", r.DeadLetter) == []
    assert len(world.read("rollouts.commands", r.AdoptCommand)) == 4


def test_a_process_whose_clock_was_set_back_at_its_start_owns_what_it_takes() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(heartbeat(world, "r0", incarnation=2000))
    run(world, operator, 0.5, {"r1": ()})
    world.write(heartbeat(world, "r0", incarnation=1000), started(world, 0, "r0", incarnation=1000))
    until = world.now + 6.0
    while world.now < until:
        world.write(heartbeat(world, "r0", ("d/0/0/0",), incarnation=1000), heartbeat(world, "r1"))
        while operator.step(world.now):
            pass
        world.advance(0.25)
    assert world.read("rollouts.commands", r.AdoptCommand) == []
    run(world, operator, 4.0, {"r1": ()})
    assert [a.rollout_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["r1"]


def test_what_the_process_before_a_clock_was_set_back_had_in_hand_is_adopted_at_once() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(heartbeat(world, "r0", ("d/0/0/0",), incarnation=2000), started(world, 0, "r0", incarnation=2000))
    run(world, operator, 0.5, {})
    world.write(heartbeat(world, "r0", incarnation=1000))
    while operator.step(world.now):
        pass
    adopted = world.read("rollouts.commands", r.AdoptCommand)
    assert [(a.rollout_id, a.incarnation) for a in adopted] == [("r0", 1000)]


def test_a_started_from_a_clock_that_runs_ahead_does_not_put_off_the_adoption() -> None:
    world = World()
    operator = Repack(CONFIG, world.context("repack"))
    world.write(replace(started(world, 0, "r0"), at_ms=world.now_ms + 3_600_000))
    run(world, operator, 4.0, {"r1": ()})
    assert [a.rollout_id for a in world.read("rollouts.commands", r.AdoptCommand)] == ["r1"]
