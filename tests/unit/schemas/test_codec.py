from __future__ import annotations

import json
import math
import pickle
import random
import typing
from dataclasses import asdict, fields, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from fastavro import schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form

from laminar.schemas import records as r
from laminar.schemas import schema_set
from laminar.schemas.codec import RECORDS, Codec
from laminar.schemas.errors import DecodeError, EncodeError
from laminar.schemas.schema_set import PACKAGED
from laminar.schemas.tokens import EMPTY, Tokens
from tests.support import sample

AVRO = Path(schema_set.__file__).parent / "avro"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec()


def damaged(**buffers: object) -> r.CompletedTrajectory:
    """A completed trajectory with some token buffers replaced."""
    return sample.completed(response=replace(sample.tokens(), **buffers))


def f32(*values: float) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def i32(*values: int) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def test_a_frame_is_avro_single_object_encoding(codec: Codec) -> None:
    data = codec.encode(sample.prompt())
    schema = PACKAGED.current("Prompt")
    digest = fingerprint(to_parsing_canonical_form(schema.whole), "CRC-64-AVRO")
    assert data[:2] == b"\xc3\x01"
    assert data[2:10].hex() == digest


def test_the_fingerprint_is_the_one_of_the_avro_specification() -> None:
    polynomial, table = 0xC15D213AA4D7A795, []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        table.append(value)
    for name in RECORDS:
        schema = PACKAGED.current(name)
        value = polynomial
        for byte in to_parsing_canonical_form(schema.whole).encode():
            value = (value >> 8) ^ table[(value ^ byte) & 0xFF]
        assert schema.fingerprint == value.to_bytes(8, "little")


def test_every_schema_has_its_own_fingerprint() -> None:
    loaded = [PACKAGED.by_fingerprint(f) for f in PACKAGED._by_fingerprint]
    assert len(loaded) == len(PACKAGED.names()) == len(list(AVRO.glob("*.avsc")))


@pytest.mark.parametrize("name", RECORDS)
def test_the_current_schema_has_the_fields_of_its_class(name: str) -> None:
    schema = PACKAGED.current(name)
    assert [f["name"] for f in schema.whole["fields"]] == [f.name for f in fields(RECORDS[name])]


def test_c6_a_token_without_a_version_is_refused_at_the_producer(codec: Codec) -> None:
    with pytest.raises(
        EncodeError, match=r"response\.versions: -1 at token 1; every sampled token carries its version"
    ):
        codec.encode(damaged(versions=i32(0, -1, 0)))
    with pytest.raises(EncodeError, match=r"response\.versions: 0 bytes, but n_tokens=3 needs 12"):
        codec.encode(damaged(versions=b""))
    with pytest.raises(EncodeError, match=r"version_min: -1 is below 0"):
        codec.encode(sample.completed(version_min=-1))


@pytest.mark.parametrize("buffer", ["ids", "logprobs", "versions", "mask"])
def test_e2_lengths_that_differ_are_refused_at_the_producer(codec: Codec, buffer: str) -> None:
    short = getattr(sample.tokens(), buffer)[:-1]
    with pytest.raises(EncodeError, match=rf"CompletedTrajectory\.response\.{buffer}: \d+ bytes, but n_tokens=3 needs"):
        codec.encode(damaged(**{buffer: short}))


def test_e2_prompt_tokens_of_another_length_are_refused_at_the_producer(codec: Codec) -> None:
    with pytest.raises(EncodeError, match=r"Prompt\.prompt_tokens: 12 bytes, but n_prompt_tokens=4 needs 16"):
        codec.encode(sample.prompt(n_prompt_tokens=4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.25])
def test_d1_nan_infinite_and_positive_logprobs_are_refused_at_the_producer(codec: Codec, bad: float) -> None:
    with pytest.raises(EncodeError, match=r"response\.logprobs: .* at token 2; a logprob is finite and at most 0"):
        codec.encode(damaged(logprobs=f32(-1.0, -0.5, bad)))


def test_d1_logprobs_of_tokens_that_were_not_sampled_do_not_matter(codec: Codec) -> None:
    record = damaged(mask=b"\x01\x00\x01", logprobs=f32(-1.0, math.nan, -2.0), versions=i32(0, -1, 0))
    assert codec.decode(codec.encode(record)) == record


def test_d1_the_first_bad_token_behind_unsampled_ones_is_named(codec: Codec) -> None:
    with pytest.raises(EncodeError, match=r"logprobs: 2\.0 at token 2"):
        codec.encode(damaged(mask=b"\x01\x00\x01", logprobs=f32(-1.0, 3.0, 2.0)))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (sample.completed(version_max=1), r"version_min, version_max: 0, 1, but the tokens carry 0 to 0"),
        (sample.completed(version_min=2, version_max=1), r"version_max: 1 is below version_min=2"),
        (sample.completed(trajectory_id="data/0/0/1"), r"trajectory_id: 'data/0/0/1' is not member 0 of its prompt"),
        (sample.completed(member=2), r"member: 2 is not within group_size=2"),
        (sample.completed(group_id="other"), r"group_id: 'other' is not its prompt's id 'data/0/0'"),
        (sample.completed(finish="abort"), r"finish: 'abort' is not one of stop, length"),
        (sample.completed(attempt=-1), r"attempt: -1 is below 0"),
        (sample.completed(text=b"abc"), r"CompletedTrajectory\.text: expected str, got bytes"),
        (sample.completed(text="\ud800"), r"CompletedTrajectory\.text: 'utf-8' codec can't encode"),
        (sample.completed(seed=1.5), r"CompletedTrajectory\.seed: expected int, got float"),
        (sample.completed(seed=2**63), r"CompletedTrajectory\.seed: \d+ does not fit into 64 bits"),
        (sample.completed(prompt=sample.prompt(group_size=0)), r"prompt\.group_size: 0 is below 1"),
        (sample.scored(reward=math.nan), r"reward: nan is not finite"),
        (sample.scored(reward=None, failure=None), r"failure: a null reward needs a reason"),
        (sample.scored(reward=1.0, failure="no"), r"failure: 'no' beside a reward of 1\.0"),
        (sample.ended(finish=None), r"error: an end without finish needs a reason"),
        (sample.training_step(trained=["a"], metrics={"loss": "x"}), r"metrics: expected float, got str"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused_with_the_field(codec: Codec, record: r.Record, reason: str) -> None:
    with pytest.raises(EncodeError, match=reason):
        codec.encode(record)


def test_only_records_of_a_topic_can_be_encoded(codec: Codec) -> None:
    with pytest.raises(EncodeError, match=r"Tokens is not a record \(valid: Prompt, TrajectoryStarted"):
        codec.encode(typing.cast("r.Record", EMPTY))


def _written_by(name: str, record: r.Record) -> bytes:
    """The record in the frame of an older schema, which has fewer fields."""
    old = PACKAGED._load(name)
    body = BytesIO()
    schemaless_writer(body, old.parsed, asdict(record))
    return b"\xc3\x01" + old.fingerprint + body.getvalue()


def test_s19_an_old_version_decodes_to_the_current_record(codec: Codec) -> None:
    record = sample.scored(components={"format": 1.0})
    decoded = codec.decode(_written_by("laminar.v1.ScoredTrajectory", record))
    assert decoded == record
    assert isinstance(decoded, r.ScoredTrajectory)
    assert decoded.meta == {}


@pytest.mark.parametrize("name", ["v2.ScoredTrajectory", "v1.CompletedTrajectory", "v1.TrajectoryStarted"])
def test_s19_a_trajectory_of_the_release_before_had_its_versions_pinned(codec: Codec, name: str) -> None:
    completed = sample.completed(version=3, updates="in_flight", meta={"tool": "none"})
    now, then = {
        "ScoredTrajectory": (sample.scored(completed), sample.scored(replace(completed, updates="pinned"))),
        "CompletedTrajectory": (completed, replace(completed, updates="pinned")),
        "TrajectoryStarted": (sample.started(updates="in_flight"), sample.started()),
    }[name[3:]]
    assert codec.decode(codec.encode(now)) == now
    assert codec.decode(_written_by(f"laminar.{name}", now)) == then


def test_s19_a_heartbeat_of_the_release_before_has_no_lease(codec: Codec) -> None:
    record = r.RolloutStatus(
        rollout_id="rollout-0",
        incarnation=5,
        state="sampling",
        version=3,
        kv_used=20,
        kv_total=100,
        running=1,
        waiting=0,
        preempted=0,
        max_running=8,
        tokens_per_s=2.5,
        in_flight=(r.InFlight(trajectory_id="d/0/0/0", attempt=1, n_tokens=20),),
        at_ms=9,
        lease_s=30.0,
        updates="in_flight",
    )
    assert codec.decode(codec.encode(record)) == record
    before = replace(record, updates="pinned")
    assert codec.decode(_written_by("laminar.v2.RolloutStatus", record)) == before
    assert codec.decode(_written_by("laminar.v1.RolloutStatus", record)) == replace(before, lease_s=0.0)


def manifest(**probe: object) -> r.VersionManifest:
    """A version of no tensors, with one probe of two prefixes of three tokens."""
    values: dict[str, typing.Any] = {
        "tokens": i32(5, 6, 7), "lengths": i32(1, 3), "top_k": 2, "ids": i32(9, 4, 4, 9),
        "logprobs": f32(-0.5, -1.0, 0.0, -9.0), "dtype": "float32", **probe,
    }  # fmt: skip
    return r.VersionManifest(
        run_id="run", epoch=1, version=3, parent=2, step=3, state="committed", tensors=(), total_bytes=0, chunk_bytes=8,
        chunk_digests=b"", root_digest="", relay_id="", relay_url="", relay_boot="", at_ms=9,
        probes=(r.Probe(**values),),
    )  # fmt: skip


def test_s19_a_version_of_the_release_before_has_no_probes(codec: Codec) -> None:
    without = replace(manifest(), probes=())
    current = codec.encode(without)
    assert current[-1:] == b"\x00"
    old = PACKAGED._load("laminar.v1.VersionManifest")
    assert codec.decode(current[:2] + old.fingerprint + current[10:-1]) == without


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ({"top_k": 0}, r"VersionManifest\.probes\[0\]\.top_k: 0 is below 1"),
        ({"tokens": b"12345"}, r"tokens: 5 bytes, but 4 per token are needed"),
        ({"lengths": b"123"}, r"lengths: 3 bytes"),
        ({"ids": i32(1, 2, 3)}, r"ids: 12 bytes, but 2 prefixes and top_k=2 are needed"),
        ({"logprobs": f32(-1.0)}, r"logprobs: 4 bytes, but 2 prefixes and top_k=2 are needed"),
        ({"lengths": i32(1, 4)}, r"lengths: 4 is above the 3 tokens of the sequence"),
        ({"lengths": i32(0, 3)}, r"lengths: 0 is below 1"),
        ({"ids": i32(1, 2, 3, -4)}, r"ids: -4 is below 0"),
        ({"logprobs": f32(-0.5, 0.5, -1.0, -2.0)}, r"logprobs: not all are finite and at most 0"),
        ({"logprobs": f32(-0.5, math.nan, -1.0, -2.0)}, r"logprobs: not all are finite and at most 0"),
    ],
)
def test_d2_probes_that_contradict_themselves_are_refused_at_the_producer(
    codec: Codec, probe: dict[str, object], reason: str
) -> None:
    assert codec.decode(codec.encode(manifest())) == manifest()
    with pytest.raises(EncodeError, match=reason):
        codec.encode(manifest(**probe))


def test_s19_a_record_of_a_newer_schema_is_resolved_once_its_schema_is_known(tmp_path: Path) -> None:
    newer = json.loads((AVRO / "drain_command.v1.avsc").read_text())
    newer["namespace"] = "laminar.v2"
    newer["fields"].append({"name": "grace_s", "type": "double", "default": 0.0})
    (tmp_path / "drain_command.v2.avsc").write_text(json.dumps(newer))
    digest = bytes.fromhex(fingerprint(to_parsing_canonical_form(newer), "CRC-64-AVRO"))
    command = r.DrainCommand(rollout_id="rollout-0", incarnation=5, at_ms=9)
    data = b"\xc3\x01" + digest + Codec().encode(command)[10:] + b"\0" * 8

    assert Codec(newer_schemas=tmp_path).decode(data) == command
    with pytest.raises(DecodeError, match=rf"fingerprint {digest.hex()}: no record of this release has it; a newer"):
        Codec().decode(data)


def test_s19_a_newer_schema_is_read_but_never_written(tmp_path: Path) -> None:
    newer = json.loads((AVRO / "drain_command.v1.avsc").read_text())
    newer["namespace"] = "laminar.v2"
    (tmp_path / "drain_command.v2.avsc").write_text(json.dumps(newer))
    command = r.DrainCommand(rollout_id="rollout-0", incarnation=5, at_ms=9)
    assert Codec(newer_schemas=tmp_path).encode(command) == Codec().encode(command)


@pytest.mark.parametrize("data", [b"", b"\xc3", b"\xc3\x01", b"\xc3\x01\0\0\0", b"not framed at all", b"\0" * 40])
def test_s19_unframed_bytes_are_refused(codec: Codec, data: bytes) -> None:
    with pytest.raises(DecodeError, match="not framed"):
        codec.decode(data)


def test_a_nested_type_alone_is_not_a_record(codec: Codec) -> None:
    tokens = PACKAGED._load("laminar.v1.Tokens")
    with pytest.raises(DecodeError, match="no record of this release has it"):
        codec.decode(b"\xc3\x01" + tokens.fingerprint + b"\0" * 5)


def test_a14_bytes_behind_a_record_are_refused(codec: Codec) -> None:
    with pytest.raises(DecodeError, match="1 bytes follow the record"):
        codec.decode(codec.encode(sample.prompt()) + b"\0")


def test_e2_lengths_that_lie_are_refused_at_the_consumer(codec: Codec) -> None:
    record = sample.completed(response=EMPTY, text="")
    data = codec.encode(record)
    honest = sample.completed()
    whole = codec.encode(honest)
    at = whole.index(honest.response.ids) - 2  # n_tokens and the length of ids are one byte each
    assert whole[at : at + 2] == bytes((6, 24))
    with pytest.raises(DecodeError, match="but n_tokens=2 needs 8"):
        codec.decode(whole[:at] + bytes((4,)) + whole[at + 1 :])
    with pytest.raises(DecodeError):
        codec.decode(data[:30] + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" + data[31:])


def test_d1_bad_logprobs_are_refused_at_the_consumer(codec: Codec) -> None:
    record = sample.completed()
    data = codec.encode(record)
    bad = data.replace(record.response.logprobs, f32(-1.0, math.nan, -1.0))
    with pytest.raises(DecodeError, match="logprobs: nan at token 1"):
        codec.decode(bad)


def test_a14_ten_thousand_mutated_records_decode_or_raise_decode_error(codec: Codec) -> None:
    rng = random.Random(20)
    seeds = [
        codec.encode(record)
        for record in (
            sample.prompt(meta={"a": "b"}),
            sample.started(),
            sample.completed(),
            sample.scored(components={"x": 1.0}),
            sample.training_step(trained=["a", "b"], dropped=[r.Dropped(trajectory_id="c", reason="stale")]),
            sample.trainer_started(),
        )
    ]
    decoded = 0
    for _ in range(10_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(10, len(data)) if rng.random() < 0.9 else rng.randrange(len(data))
            match rng.randrange(5):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = rng.randbytes(rng.randint(1, 8))
                case _:
                    data[at : at + 1] = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # a length of 2**63 - 1
            if len(data) < 12:
                break
        try:
            record = codec.decode(bytes(data))
        except DecodeError:
            continue
        decoded += 1
        assert codec.encode(record)  # whatever decodes obeys every rule
    assert 0 < decoded < 5_000


def test_records_and_errors_survive_pickling() -> None:
    record = sample.scored()
    assert pickle.loads(pickle.dumps(record)) == record
    error = pickle.loads(pickle.dumps(DecodeError("why")))
    assert (type(error), str(error)) == (DecodeError, "why")


def test_slices_and_concatenation_of_tokens_are_inverse() -> None:
    whole = Tokens.build(ids=[1, 2, 3, 4], logprobs=[-1.0, -2.0, -3.0, -4.0], version=2)
    assert Tokens.concat([whole[:1], whole[1:3], whole[3:]]) == whole
    assert whole[2:1] == EMPTY
