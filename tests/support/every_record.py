"""One sound record of every type that may stand on a topic, no field at its default where that can be."""

from __future__ import annotations

import numpy as np

from laminar.schemas import records as r
from laminar.schemas.tokens import ids_buffer
from tests.support import sample

__all__ = ["every_record"]


def every_record() -> list[r.Record]:
    member = "data/0/0/0"
    prompt = sample.prompt(messages='[{"role": "user"}]', min_version=3, round_size=2, meta={"source": "gsm"})
    snapshot = r.Snapshot(
        trajectory_id=member,
        attempt=2,
        member=0,
        prompt=prompt,
        response=sample.tokens(4, version=3),
        version=3,
        seed=11,
        timings=r.Timings(admitted_ms=1, started_ms=2, first_token_ms=3, ended_ms=4, moves=1),
    )
    completed = sample.completed(prompt, version=3, logprobs_mode="raw", updates="in_flight", meta={"tool": "none"})
    header = r.Header(key="traceparent", value=b"\x00\xff")
    tensor = r.TensorEntry(name="w", dtype="BF16", shape=(2, 3), offset=0, size=12)
    probe = r.Probe(
        tokens=ids_buffer([5, 6, 7]), lengths=ids_buffer([2]), top_k=2, ids=ids_buffer([9, 4]),
        logprobs=np.asarray([-0.5, -1.25], "<f4").tobytes(), dtype="float32",
    )  # fmt: skip
    held = r.HeldVersion(version=3, epoch=1, chunks_verified=1, n_chunks=2)
    dropped = r.Dropped(trajectory_id=member, reason="stale")
    return [
        prompt,
        sample.started(prompt, version=3, updates="in_flight"),
        r.TrajectoryTokens(trajectory_id=member, attempt=0, start=0, tokens=sample.tokens(3, version=3), at_ms=9),
        r.TrajectoryMoved(
            trajectory_id=member, attempt=1, reason="repack", from_rollout="rollout-0", to_rollout="rollout-1",
            to_incarnation=5, n_tokens=3, at_ms=9,
        ),
        sample.ended(finish=None, error="the engine failed"),
        completed,
        sample.scored(completed, components={"format": 0.25}, meta={"judge": "a"}),
        sample.scored(completed, reward=None),
        r.VersionManifest(
            run_id="run", epoch=1, version=3, parent=2, step=3, state="committed", tensors=(tensor,), total_bytes=12,
            chunk_bytes=8, chunk_digests=b"\x01" * 16, root_digest="ab", tied={"lm_head": "w"}, relay_id="relay-0",
            relay_url="http://127.0.0.1:1", relay_boot="b", at_ms=9, meta={"note": "x"}, probes=(probe,),
        ),
        r.RolloutStatus(
            rollout_id="rollout-0", incarnation=5, state="sampling", version=3, kv_used=20, kv_total=100, running=1,
            waiting=2, preempted=3, max_running=8, tokens_per_s=2.5,
            in_flight=(r.InFlight(trajectory_id=member, attempt=1, n_tokens=20),), at_ms=9, lease_s=30.0,
            updates="in_flight",
        ),
        r.ReleaseCommand(
            rollout_id="rollout-0", incarnation=5, trajectory_ids=(member,), to_rollout="rollout-1", to_incarnation=6,
            at_ms=9,
        ),
        r.AdoptCommand(
            rollout_id="rollout-1", incarnation=6, reason="dead", from_rollout="rollout-0", snapshot=snapshot, at_ms=9
        ),
        r.DrainCommand(rollout_id="rollout-0", incarnation=5, at_ms=9),
        r.RelayStatus(
            relay_id="relay-0", boot_id="b", url="http://127.0.0.1:1", host="h", shm_dir="/dev/shm/x", zone="z",
            versions=(held,), at_ms=9,
        ),
        sample.trainer_started(),
        sample.training_step(
            trained=[member], dropped=[dropped], staleness={"1": 2}, metrics={"loss": 0.5}, offsets={"t[0]": 7}
        ),
        r.Evaluation(
            run_id="run", epoch=1, step=3, round=1, version=3, reward_mean=0.5, n=1, resolved=(dropped,), at_ms=9
        ),
        r.DataExhausted(run_id="run", groups=5, at_ms=9),
        r.RunEnded(run_id="run", epoch=1, step=3, reason="all 3 steps are done", at_ms=9),
        r.DeadLetter(
            operator="reward", kind="DecodeError", error="damaged", topic="trajectories.completed", partition=1,
            offset=7, attempt=3, key=b"k", value=b"\xc3\x01\xff", headers=(header,), group_id="data/0/0",
            trajectory_ids=(member,), at_ms=9,
        ),
        r.DeadLetterSettled(
            letter_partition=0, letter_offset=4, action="retry", key=None, group_id="data/0/0",
            trajectory_ids=(member,), by="someone@host", at_ms=9,
        ),
        r.OffsetsSkipped(
            operator="reward", group="run.reward", topic="trajectories.completed", partition=1, from_offset=3,
            to_offset=9, at_ms=9,
        ),
    ]  # fmt: skip
