"""What a trajectory of 32k tokens costs to encode and decode, beside Avro arrays of the same numbers.

``python -m benchmarks.codec [--quick]``. The trajectory is whole: prompt, text, four token buffers, all rules checked
both ways. The reference holds only ids, logprobs, versions and mask as ``array<int>`` and ``array<float>``.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from benchmarks.claim import Claim, best_ms, quick_from_arguments, report
from laminar.schemas.codec import Codec
from laminar.schemas.records import CompletedTrajectory, Prompt, Sampling, Timings
from laminar.schemas.tokens import Tokens, ids_buffer

N_TOKENS = 32 * 1024
GOAL_MS = 0.5
GOAL_TIMES = 50.0


def trajectory(n_tokens: int) -> CompletedTrajectory:
    """A finished trajectory with random tokens and four characters of text per token."""
    rng = np.random.default_rng(0)
    prompt = Prompt(
        prompt_id="9f3a/0/17",
        dataset="9f3a",
        epoch=0,
        index=17,
        purpose="train",
        task="math",
        group_size=8,
        prompt_tokens=ids_buffer(rng.integers(0, 150_000, 512, dtype=np.int32)),
        n_prompt_tokens=512,
        prompt_text="word " * 400,
        reference="42",
        sampling=Sampling(max_tokens=n_tokens),
        seed=1,
        created_ms=1_700_000_000_000,
    )
    return CompletedTrajectory(
        trajectory_id="9f3a/0/17/3",
        group_id="9f3a/0/17",
        member=3,
        attempt=0,
        prompt=prompt,
        response=Tokens.build(
            ids=rng.integers(0, 150_000, n_tokens, dtype=np.int32),
            logprobs=-rng.standard_exponential(n_tokens, dtype=np.float32),
            version=7,
        ),
        text="four" * n_tokens,
        finish="stop",
        rollout_id="rollout-0",
        engine="torch",
        seed=3,
        version_min=7,
        version_max=7,
        timings=Timings(admitted_ms=1_700_000_000_000, ended_ms=1_700_000_060_000),
    )


def arrays(tokens: Tokens) -> tuple[Any, dict[str, Any]]:
    """The reference: an ordinary Avro schema of arrays, and its value."""
    fields = {"ids": "int", "logprobs": "float", "versions": "int", "mask": "int"}
    schema = parse_schema(
        {
            "type": "record",
            "name": "ArrayTokens",
            "fields": [{"name": name, "type": {"type": "array", "items": kind}} for name, kind in fields.items()],
        }
    )
    return schema, {name: getattr(tokens, f"{name}_T").tolist() for name in fields}


def main() -> None:
    """Measure and report."""
    quick = quick_from_arguments(__doc__)
    rounds = 100 if quick else 400
    codec, record = Codec(), trajectory(N_TOKENS)
    framed = codec.encode(record)
    encode_ms = best_ms(lambda: codec.encode(record), rounds=rounds, calls=4)
    decode_ms = best_ms(lambda: codec.decode(framed), rounds=rounds, calls=4)

    schema, plain = arrays(record.response)

    def write_arrays() -> bytes:
        buffer = BytesIO()
        schemaless_writer(buffer, schema, plain)
        return buffer.getvalue()

    as_arrays = write_arrays()
    array_encode_ms = best_ms(write_arrays, rounds=3 if quick else 10, calls=1)
    array_decode_ms = best_ms(
        lambda: schemaless_reader(BytesIO(as_arrays), schema, None), rounds=3 if quick else 10, calls=1
    )

    both, array_both = encode_ms + decode_ms, array_encode_ms + array_decode_ms
    report(
        f"A trajectory of {N_TOKENS} tokens",
        ("", "KB", "encode ms", "decode ms", "both ms"),
        (
            ("Laminar's codec", len(framed) / 1000, encode_ms, decode_ms, both),
            ("Avro arrays (tokens only)", len(as_arrays) / 1000, array_encode_ms, array_decode_ms, array_both),
        ),
        (
            Claim(name="codec_32k_both_ways", ratio=both, goal=GOAL_MS, unit="ms", lower_is_better=True),
            Claim(
                name="codec_32k_against_avro_arrays",
                ratio=array_both / both,
                goal=GOAL_TIMES,
                unit="x",
                lower_is_better=False,
            ),
        ),
    )


if __name__ == "__main__":
    main()
