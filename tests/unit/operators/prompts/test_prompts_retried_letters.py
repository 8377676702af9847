"""What admission makes of dead letters that are retried, and of groups with a member that nobody can name."""

from __future__ import annotations

from pathlib import Path

from laminar.operators.prompts.ledger import GroupLedger
from laminar.schemas import records as r
from laminar.streams.dead_letter import RETRY_OF
from laminar.streams.log import OutRecord
from tests.support.dataflow import World, make_prompt
from tests.support.training import dead
from tests.unit.operators.prompts.test_prompts_operator import config, operator, settle


def settled(action: r.SettleAction, *members: str) -> r.DeadLetterSettled:
    return r.DeadLetterSettled(
        letter_partition=0, letter_offset=0, action=action, key=None, trajectory_ids=members, by="ada", at_ms=0
    )


def step(number: int, *trained: str, epoch: int = 0) -> r.TrainingStep:
    return r.TrainingStep(
        run_id="run", epoch=epoch, step=number, version=number, trained=trained, dropped=(), staleness={}, metrics={},
        offsets={}, n_tokens=0, duration_ms=0.0, at_ms=0,
    )  # fmt: skip


def members(index: int = 0) -> list[str]:
    return [f"d/0/{index}/{member}" for member in range(4)]


def ledger_after(*events: r.Record) -> GroupLedger:
    ledger = GroupLedger("run")
    for event in (make_prompt(0), make_prompt(1), *events):
        ledger.apply(event)
    return ledger


def test_a_group_that_died_whole_is_outstanding_again_when_one_letter_is_retried() -> None:
    assert ledger_after(dead(*members())).load.outstanding == 1
    assert ledger_after(dead(*members()), settled("retry", members()[2])).load.outstanding == 2
    assert ledger_after(dead(*members()), settled("drop", members()[2])).load.outstanding == 1
    again = ledger_after(dead(*members()), settled("retry", members()[2]), dead(members()[2]))
    assert again.load.outstanding == 1


def test_a_step_resolves_the_whole_group_whoever_died_in_it_unnamed() -> None:
    assert ledger_after(step(1, *members()[:3])).load.outstanding == 1


def test_a_voided_step_makes_its_groups_outstanding_again() -> None:
    resumed = r.TrainerStarted(run_id="run", epoch=1, step=0, version=5, at_ms=0)
    assert ledger_after(step(1, *members()), resumed).load.outstanding == 2
    assert ledger_after(step(1, *members()), resumed, step(1, *members(), epoch=1)).load.outstanding == 1


def test_a_retry_for_a_consumed_group_holds_nothing_up() -> None:
    ledger = ledger_after(dead(members()[3]), step(1, *members()[:3]), settled("retry", members()[3]))
    assert ledger.load.outstanding == 1


def test_a_prompt_that_stands_on_its_topic_again_is_not_admitted_again(tmp_path: Path) -> None:
    world = World(groups_per_step=2, group_size=4, steps=9)
    given = config(tmp_path, epochs=1)
    settle(world, operator(world, given))
    first = world.read("prompts", r.Prompt)
    assert len(first) == 6
    again = OutRecord(
        topic="prompts", key=b"x", value=world.codec.encode(first[0]), headers=((RETRY_OF, b"dead.letters[0]@0"),)
    )
    with world._producer.transaction() as tx:
        tx.send(again)
    restarted = operator(world, given)
    settle(world, restarted)
    assert restarted._ledger.admitted == 6
