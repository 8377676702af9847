from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engines.scripted import Answer, ScriptedEngine, always
from laminar.operators.rollout.operator import Rollout
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError
from laminar.schemas.tokens import ids_buffer
from laminar.streams.dead_letter import bare, dead_letter, shortened
from laminar.streams.log import LogRecord, OutRecord
from laminar.streams.loop import Loop
from laminar.streams.memory import MemoryLog
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Inline
from tests.support import sample
from tests.support.dataflow import World
from tests.support.weights import NoWeights

CODEC = Codec()


def source(**changes: object) -> LogRecord:
    made = LogRecord(
        topic="trajectories.completed", partition=3, offset=99, timestamp_ms=0, key=b"d/0/0", value=b"bytes",
        headers=(("h", b"1"),),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def letter_of(record: LogRecord, text: str = "broken") -> r.DeadLetter:
    return dead_letter(record, DecodeError(text), operator="reward", attempt=2, at_ms=7)


def test_a_letter_holds_the_original() -> None:
    letter = letter_of(source())
    assert (letter.topic, letter.partition, letter.offset, letter.attempt) == ("trajectories.completed", 3, 99, 2)
    assert (letter.key, letter.value, letter.headers) == (b"d/0/0", b"bytes", (r.Header(key="h", value=b"1"),))
    assert (letter.kind, letter.error) == ("DecodeError", "broken")


def test_a_record_that_does_not_belong_on_its_topic_is_nobodys_fate() -> None:
    def members(record: r.Record) -> tuple[str, ...]:
        made = dead_letter(source(), ValueError("no"), operator="reward", attempt=1, at_ms=0, record=record)
        return made.trajectory_ids

    assert members(sample.completed(sample.prompt(0))) == ("data/0/0/0",)
    assert members(sample.prompt(0)) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"value": b"v" * (17 << 20)},
        {"key": b"k" * 100_000},
        {"headers": tuple((f"h{i}", b"x" * 1000) for i in range(100))},
    ],
)
def test_what_is_too_large_is_left_out_and_the_letter_says_where_it_is(changes: dict[str, object]) -> None:
    letter = letter_of(source(**changes))
    assert len(CODEC.encode(letter)) < 80_000
    assert "left out; read them at trajectories.completed[3]@99" in letter.error


def test_a_bare_letter_is_small_whatever_the_error_and_keeps_its_members() -> None:
    letter = replace(letter_of(source(), "x" * 10_000_000), trajectory_ids=("d/0/0/1",), key=b"k" * 50_000)
    assert len(letter.error) < 20_000
    small = bare(letter)
    assert len(CODEC.encode(small)) < 1_500
    assert (small.trajectory_ids, small.kind, small.offset) == (("d/0/0/1",), "DecodeError", 99)


def test_a_shortened_text_keeps_both_ends_and_is_utf_8() -> None:
    assert shortened("short") == "short"
    assert shortened("a\ud800b") == "a?b"
    text = shortened("begin" + "x" * 100_000 + "end")
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "100008 characters" in text


def test_there_are_no_letters_about_letters() -> None:
    log = MemoryLog(clock=lambda: 0.0)
    log.create_topics(topic_specs())
    with log.producer("test").transaction() as tx:
        tx.send(OutRecord(topic="dead.letters", key=b"x", value=b"not a letter"))
        tx.send(outgoing(CODEC, letter_of(source())))

    def fails(record: r.Record) -> list[r.Record]:
        raise ZeroDivisionError("a faulty reader of letters")

    loop = Loop(
        log=log, codec=CODEC, name="mine", group="run.mine", instance="mine-0", transactional_id="run.mine-0",
        topics=["dead.letters"], worker=Inline(fails),
    )  # fmt: skip
    for number in range(50):
        loop.step(number * 0.1)
    assert log.reader().bounds(next(iter(loop._consumer.assignment()))).end == 2
    assert list(log.lag("run.mine", "dead.letters").values()) == [0]


def small_world(topic: str, limit: int) -> World:
    world = World()
    log = MemoryLog(clock=lambda: world.now)
    log.create_topics([replace(s, max_record_bytes=limit) if s.name == topic else s for s in topic_specs()])
    world.log, world._producer = log, log.producer("test")
    world.write(
        r.VersionManifest(
            run_id="run", epoch=0, version=0, parent=-1, step=0, state="committed", tensors=(), total_bytes=0,
            chunk_bytes=1, chunk_digests=b"", root_digest="", relay_id="", relay_url="", relay_boot="", at_ms=0,
        )
    )  # fmt: skip
    return world


def run_rollout(world: World) -> None:
    engine = ScriptedEngine(always(Answer(ids=(5, 6))), max_running=8)
    rollout = Rollout(RolloutConfig(poll_s=0.0), world.context("rollout"), engine=engine, weights=NoWeights())
    for _ in range(200):
        world.advance(0.05)
        rollout.step(world.now)
    rollout.close()


def test_a_prompt_whose_start_does_not_fit_on_its_topic_is_a_dead_letter_and_the_next_one_is_taken() -> None:
    world = small_world("trajectories.partial", 5_000)
    large = sample.prompt(1, prompt_tokens=ids_buffer(range(2_000)), n_prompt_tokens=2_000)
    world.write(sample.prompt(0), large, sample.prompt(2))
    run_rollout(world)
    (letter,) = world.read("dead.letters", r.DeadLetter)
    assert (letter.kind, letter.topic) == ("RecordTooLarge", "prompts")
    assert letter.trajectory_ids == ("data/0/1/0", "data/0/1/1")
    done = {c.group_id for c in world.read("trajectories.completed", r.CompletedTrajectory)}
    assert done == {"data/0/0", "data/0/2"}
    assert not any(world.log.lag("run.rollout", "prompts").values())


def test_a_letter_that_does_not_fit_on_dead_letters_goes_without_the_bytes() -> None:
    world = small_world("dead.letters", 1_000)
    with world._producer.transaction() as tx:
        tx.send(OutRecord(topic="prompts", key=b"data/0/0", value=b"y" * 3_000))
    run_rollout(world)
    (letter,) = world.read("dead.letters", r.DeadLetter)
    assert letter.value is None
    assert "3000 bytes are left out; read them at prompts[" in letter.error
