"""What the trainer says of versions that it publishes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.operators.trainer.config import AlgorithmConfig
from laminar.schemas import records as r
from tests.support.dataflow import make_prompt
from tests.support.training import Publisher, TrainerRun, group, scored


class Comparing(Publisher):
    """Says, as the relay's does, when a version has the bytes of the one before."""

    def stage(self, tensors: Any, *, version: int, **how: Any) -> r.VersionManifest:
        manifest = super().stage(tensors, version=version, **how)
        last = max(self.sealed, default=None)
        if last is not None and self.sealed[last] == self._staged[version]:
            return replace(manifest, meta={"identical_to": str(last)})
        return manifest


def test_d11_a_version_identical_to_the_last_is_counted_as_an_alarm_with_the_next_step(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path, algorithm=AlgorithmConfig(zero_advantage="drop"))
    run.publisher = Comparing()
    run.start()
    run.settle()
    run.world.write(*group(0), *group(1))  # step 1 learns
    run.settle()
    for index in (2, 3):  # step 2 cannot: all rewards of a group are the same
        prompt = make_prompt(index)
        run.world.write(*(scored(prompt, member, reward=1.0) for member in range(4)))
    run.settle()
    run.world.write(*group(4), *group(5))
    run.settle()
    assert [step.metrics["publish_identical"] for step in run.steps] == [0.0, 0.0, 1.0]
    assert run.committed == [0, 1, 2, 3]
