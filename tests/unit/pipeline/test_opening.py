from __future__ import annotations

from pathlib import Path

import pytest

from laminar.operators.operator import ModelConfig
from laminar.operators.prompts.config import DataConfig, PromptsConfig
from laminar.operators.relay.config import RelayConfig
from laminar.operators.rollout.config import RolloutConfig, TorchEngineConfig
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.opening import (
    opening_report,
    refuse_foreign_log,
    refuse_other_group_size,
    refuse_other_log,
    refuse_renamed,
)
from laminar.pipeline.run_folder import RunFolder
from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError, TopicMismatch
from laminar.streams.open import KafkaLogConfig
from tests.support.dataflow import World, make_prompt


def make(folder: Path, **changes: object) -> RunConfig:
    values: dict[str, object] = {
        "name": "run",
        "run_dir": folder / "run",
        "steps": 10,
        "groups_per_step": 4,
        "group_size": 8,
        "model": ModelConfig(path=folder),
        "operators": {
            "prompts": PromptsConfig(train=DataConfig(path=folder / "rows.jsonl")),
            "rollout": RolloutConfig(replicas=3, engine=TorchEngineConfig(max_running=16)),
        },
    }
    return RunConfig.model_validate({**values, **changes})


@pytest.mark.parametrize(("max_staleness", "groups"), [(None, 12), (0, 4), (1, 8), (9, 12)])
def test_c10_the_number_in_flight_and_what_it_comes_from_are_said_at_the_start(
    tmp_path: Path, max_staleness: int | None, groups: int
) -> None:
    config = make(tmp_path, max_staleness=max_staleness)
    with RunFolder(config) as folder:
        shown = "\n".join(opening_report(config, folder))
    assert f"at most {groups} groups = {groups * 8} trajectories, engines sample 48 at a time" in shown
    for constant in ("groups_per_step 4", "group_size 8", "max_staleness ", "max_outstanding_groups "):
        assert constant in shown


def test_a_new_folder_with_a_used_log_is_refused(tmp_path: Path) -> None:
    world = World()
    config = make(tmp_path)
    refuse_foreign_log(config, world.log, resumed=False)
    world.write(make_prompt(0))
    refuse_foreign_log(config, world.log, resumed=True)
    with pytest.raises(TopicMismatch, match=r"holds 1 records on prompts already, but .* is a new folder"):
        refuse_foreign_log(config, world.log, resumed=False)


def test_the_log_of_another_run_is_refused(tmp_path: Path) -> None:
    world = World()
    world.write(r.TrainerStarted(run_id="other", epoch=0, step=0, version=0, at_ms=0))
    with pytest.raises(TopicMismatch, match="is of run 'other', not 'run'"):
        refuse_foreign_log(make(tmp_path), world.log, resumed=True)


def test_a_run_cannot_go_on_with_another_log(tmp_path: Path) -> None:
    config = make(tmp_path)
    with RunFolder(config) as folder:
        refuse_other_log(config, folder)
        folder.write_config(config)
    with RunFolder(config) as folder:
        refuse_other_log(config, folder)
        with pytest.raises(TopicMismatch, match=r"began with log\.kind=sqlite, not kafka"):
            refuse_other_log(make(tmp_path, log=KafkaLogConfig()), folder)


def test_a_run_cannot_go_on_with_an_operator_under_another_name(tmp_path: Path) -> None:
    config = make(tmp_path)
    renamed = make(tmp_path, operators={**config.operators, "sampler": config.operators["rollout"], "a": RelayConfig()})
    renamed.operators.pop("rollout")
    with RunFolder(config) as folder:
        refuse_renamed(renamed, folder)  # a new folder
        folder.write_config(config.model_copy(update={"operators": {**config.operators, "b": RelayConfig()}}))
    with RunFolder(config) as folder:
        refuse_renamed(config, folder)
        with pytest.raises(
            ConfigError, match="the operator of kind 'rollout' is called 'rollout', not 'sampler'"
        ) as caught:
            refuse_renamed(renamed, folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_cannot_go_on_with_groups_of_another_size(tmp_path: Path) -> None:
    config = make(tmp_path)
    with RunFolder(config) as folder:
        refuse_other_group_size(make(tmp_path, group_size=4), folder)  # a new folder
        folder.write_config(config)
    with RunFolder(config) as folder:
        refuse_other_group_size(make(tmp_path, groups_per_step=2), folder)
        with pytest.raises(ConfigError, match=r"group_size: the run in .* began with 8, not 4,") as caught:
            refuse_other_group_size(make(tmp_path, group_size=4), folder)
    assert len(str(caught.value).splitlines()) == 1
