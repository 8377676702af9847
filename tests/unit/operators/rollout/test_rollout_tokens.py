"""What a rollout writes while it samples: deltas, completed trajectories, dead letters; each token once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from laminar.operators.repack.fold import PartialPool
from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always, by_trajectory
from laminar.schemas import records as r
from laminar.schemas.errors import Aborted, Unavailable
from laminar.streams.log import TopicPartition, TopicSpec
from laminar.streams.topics import topic_specs
from tests.unit.operators.rollout.stage import FailingCommits, Stage, ten

FIRST = "d/0/0/0"
LONG = r.Sampling(max_tokens=1000)


def pool_of(stage: Stage) -> PartialPool:
    pool = PartialPool()
    for offset, one in enumerate(stage.read("trajectories.partial", object)):
        pool.apply(one, TopicPartition("trajectories.partial", 0), offset)
    return pool


def one_group(stage: Stage, **changes: object) -> None:
    stage.prompts(1, group_size=1, sampling=LONG, **changes)


def test_deltas_follow_the_sampling_and_make_up_the_response(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(100))), delta_s=0.2)
    one_group(stage)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    deltas = [e for e in stage.partial(FIRST) if isinstance(e, r.TrajectoryTokens)]
    assert 3 <= len(deltas) <= 6  # a second of sampling, a delta each 0.2 s
    start = 0
    for delta in deltas:
        assert delta.start == start
        start += delta.tokens.n_tokens
    ids = [i for d in deltas for i in d.tokens.ids_T.tolist()]
    assert ids == stage.completed()[FIRST].response.ids_T.tolist()[: len(ids)]


def test_many_fresh_tokens_of_all_trajectories_together_bring_the_deltas_forward(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(100))), delta_s=1000.0, delta_tokens=40)
    stage.prompts(1, group_size=8, sampling=LONG)
    stage.run(0.3, rollout)
    deltas = stage.read("trajectories.partial", r.TrajectoryTokens)
    assert {delta.tokens.n_tokens for delta in deltas} == {5}


def test_a_short_trajectory_needs_no_delta(stage: Stage) -> None:
    rollout = stage.rollout(delta_s=10.0)
    one_group(stage)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    assert [type(e).__name__ for e in stage.partial(FIRST)] == ["TrajectoryStarted", "TrajectoryEnded"]


def test_no_token_is_lost_or_written_twice_when_transactions_abort(stage: Stage) -> None:
    faults = FailingCommits()
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(60)), max_running=8), faults=faults, delta_s=0.03)
    stage.prompts(2, sampling=LONG)
    for _ in range(200):
        faults.next(Aborted, times=2)
        stage.run(0.05, rollout)
        if len(stage.completed()) == 8:
            break
    pool = pool_of(stage)
    assert (len(pool.alive), pool.late) == (0, 0)
    for one in stage.completed().values():
        assert one.response.ids_T.tolist() == list(range(100, 160))
    assert len(stage.read("trajectories.partial", r.TrajectoryEnded)) == 8


def test_completed_and_ended_are_visible_together_or_not_at_all(stage: Stage) -> None:
    faults = FailingCommits()
    rollout = stage.rollout(faults=faults, heartbeat_s=1000.0)
    one_group(stage)
    for _ in range(40):
        faults.next(Aborted)
        rollout.step(stage.world.now)
        ended = len(stage.read("trajectories.partial", r.TrajectoryEnded))
        assert ended == len(stage.completed())
        faults.times = 0
        stage.run(0.01, rollout)
        ended = len(stage.read("trajectories.partial", r.TrajectoryEnded))
        assert ended == len(stage.completed())
    assert ended == 1


def test_a_crash_loses_only_what_came_since_the_last_delta(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(200))), delta_s=0.1)
    one_group(stage)
    stage.run(1.0, rollout)
    rollout.close()
    [alive] = pool_of(stage).alive.values()
    assert 80 <= alive.n_response <= 100
    assert alive.response().ids_T.tolist() == list(range(100, 100 + alive.n_response))


def test_an_engine_that_dies_ends_the_process_and_leaves_the_partials(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(200, crash_at=50))), delta_s=0.05)
    one_group(stage)
    with pytest.raises(Unavailable, match="crashed at token 50"):
        stage.run(2.0, rollout)
    [alive] = pool_of(stage).alive.values()
    assert alive.n_response >= 40


def test_b14_a_member_that_fails_is_tried_again_and_keeps_its_tokens(stage: Stage) -> None:
    answers = {FIRST: ten(fail_times=2, fail_at=4)}
    engine = ScriptedEngine(by_trajectory(answers, ten()))
    rollout = stage.rollout(engine=engine, member_attempts=3)
    stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 4, rollout)
    assert stage.letters() == []
    assert stage.completed()[FIRST].response.ids_T.tolist() == list(range(100, 110))
    tries = [request.sampled.n_tokens for request in engine.submitted if request.trajectory_id == FIRST]
    assert tries == [0, 4, 4]


def test_b14_a_member_that_fails_n_times_ends_in_a_dead_letter_and_the_others_complete(stage: Stage) -> None:
    answers = {FIRST: ten(fail_times=99, fail_at=4)}
    rollout = stage.rollout(engine=ScriptedEngine(by_trajectory(answers, ten())), member_attempts=3)
    stage.prompts(1)
    stage.until(lambda: len(stage.completed()) == 3 and bool(stage.letters()), rollout)
    [letter] = stage.letters()
    assert (letter.trajectory_ids, letter.group_id, letter.attempt) == ((FIRST,), "d/0/0", 3)
    assert "scripted failure at token 4" in letter.error
    last = stage.partial(FIRST)[-1]
    assert (last.finish, last.n_tokens) == (None, 4)
    assert "scripted failure" in last.error
    assert len(pool_of(stage).alive) == 0


def test_a4_a_prompt_above_the_models_limit_ends_in_dead_letters_and_others_go_on(stage: Stage) -> None:
    rollout = stage.rollout(engine=ScriptedEngine(always(ten(4)), max_model_len=16))
    stage.prompts(1)
    stage.prompts(1, first=1, prompt_tokens=bytes(4 * 20), n_prompt_tokens=20)
    stage.prompts(1, first=2)
    stage.until(lambda: len(stage.completed()) == 8 and len(stage.letters()) == 4, rollout)
    assert {letter.trajectory_ids for letter in stage.letters()} == {(f"d/0/1/{m}",) for m in range(4)}
    assert all("20 prompt tokens" in letter.error and "16" in letter.error for letter in stage.letters())
    assert len(pool_of(stage).alive) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5])
@pytest.mark.parametrize("at", [0, 7])
def test_d1_unsound_logprobs_never_reach_the_log_and_only_their_trajectory_fails(
    stage: Stage, bad: float, at: int
) -> None:
    logprobs = tuple(bad if i == at else -0.5 for i in range(40))
    answers = {FIRST: ten(40, logprobs=logprobs)}
    rollout = stage.rollout(engine=ScriptedEngine(by_trajectory(answers, ten(40))), delta_s=0.05)
    stage.prompts(1, sampling=LONG)
    stage.until(lambda: len(stage.completed()) == 3 and bool(stage.letters()), rollout)
    [letter] = stage.letters()
    assert letter.trajectory_ids == (FIRST,)
    assert "logprob" in letter.error
    written = [e for e in stage.partial(FIRST) if isinstance(e, r.TrajectoryTokens)]
    assert sum(e.tokens.n_tokens for e in written) <= at
    assert len(pool_of(stage).alive) == 0


def test_d1_an_unsound_value_that_does_not_come_again_costs_one_attempt(stage: Stage) -> None:
    calls = itertools.count()

    def script(request: EngineRequest) -> Answer:
        return ten(20, logprobs=math.nan) if next(calls) == 0 else ten(20)

    rollout = stage.rollout(engine=ScriptedEngine(script))
    one_group(stage)
    stage.until(lambda: len(stage.completed()) == 1, rollout)
    assert stage.letters() == []
    assert stage.completed()[FIRST].response.n_tokens == 20


@pytest.mark.parametrize("n_missing", [0, 1])
@pytest.mark.parametrize("tokens_per_poll", [1, 100])
def test_c6_a_token_without_a_version_is_refused_at_the_rollout(
    stage: Stage, n_missing: int, tokens_per_poll: int
) -> None:
    class Unversioned(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[Delta]:
            return [
                replace(d, tokens=replace(d.tokens, versions=b"\xff\xff\xff\xff" * (d.tokens.n_tokens - n_missing)))
                for d in super().poll(timeout_s)
            ]

    rollout = stage.rollout(engine=Unversioned(always(ten()), tokens_per_poll=tokens_per_poll))
    one_group(stage)
    stage.until(lambda: bool(stage.letters()), rollout)
    assert "version" in stage.letters()[0].error
    assert stage.completed() == {}
    assert stage.read("trajectories.partial", r.TrajectoryTokens) == []


def test_s8_a_response_above_the_topics_size_limit_becomes_a_dead_letter() -> None:
    stage = Stage()
    for name in ("trajectories.completed",):
        stage.world.log.delete_topic(name)
        spec = next(s for s in topic_specs() if s.name == name)
        stage.world.log.create_topics(
            [TopicSpec(name=name, partitions=spec.partitions, cleanup=spec.cleanup, max_record_bytes=1500)]
        )
    stage.publish(0)
    answers = {FIRST: ten(300)}
    rollout = stage.rollout(engine=ScriptedEngine(by_trajectory(answers, ten())), delta_s=0.05)
    stage.prompts(1, sampling=LONG)
    stage.until(lambda: len(stage.completed()) == 3 and bool(stage.letters()), rollout)
    [letter] = stage.letters()
    assert (letter.kind, letter.trajectory_ids) == ("RecordTooLarge", (FIRST,))
    assert len(pool_of(stage).alive) == 0


def test_preemption_shows_in_the_heartbeat_and_changes_no_token(stage: Stage) -> None:
    engine = ScriptedEngine(always(ten(12)), kv_total=40)
    rollout = stage.rollout(engine=engine, max_in_flight=8, heartbeat_s=0.05)
    stage.prompts(2)
    stage.until(lambda: len(stage.completed()) == 8, rollout)
    told = [one.preempted for one in stage.read("rollouts.status", r.RolloutStatus)]
    assert told == sorted(told)
    assert told[0] == 0 < engine.stats().preempted == told[-1]
    assert rollout._context.measures.gauges["rollout_preempted"] == told[-1]
    assert {tuple(one.response.ids_T.tolist()) for one in stage.completed().values()} == {tuple(range(100, 112))}
    assert len(pool_of(stage).alive) == 0
