"""quix-streams with its exactly-once setting. It runs in an environment of its own, with Laminar's sources on its path.

``python -m benchmarks.contender.quix BOOTSTRAP SOURCE TARGET GROUP WORK``; WORK as for ``bare``.
"""

from __future__ import annotations

import sys

from quixstreams import Application  # type: ignore[import-not-found]

from benchmarks.contender.bare import BATCH, copy, score


def main() -> None:
    """Until it is killed."""
    bootstrap, source, target, group, work = sys.argv[1:]
    application = Application(
        broker_address=bootstrap,
        consumer_group=group,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_every=BATCH,
        commit_interval=0.1,
        auto_create_topics=False,
        loglevel="ERROR",
        producer_extra_config={"compression.type": "zstd", "batch.size": 1_000_000},
    )
    frame = application.dataframe(application.topic(source, value_deserializer="bytes", key_deserializer="bytes"))
    frame = frame.apply({"score": score, "copy": copy}[work])
    frame.to_topic(application.topic(target, value_serializer="bytes", key_serializer="bytes"))
    application.run()


if __name__ == "__main__":
    main()
